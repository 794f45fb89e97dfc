// Calls the gateway with the types that openapi-typescript generates from its document.
import createClient from "openapi-fetch";
import type { components, paths } from "./gateway";

type Body = components["schemas"]["OpenAIEmbeddingsRequest"];

const { GATEWAY, KEY, MODEL } = process.env as Record<string, string>;
const client = createClient<paths, "application/json">({ baseUrl: GATEWAY, headers: { authorization: `Bearer ${KEY}` } });

const body: Body = { model: MODEL, input: ["an apple", "the sea"] };
const embedded = await client.POST("/v1/embeddings", { body });
const ranked = await client.POST("/v1/rerank", {
  body: { model: MODEL, query: "fruit", documents: ["a car", "an apple"] },
});
const plain = await client.POST("/embed", { body: { inputs: "an apple" } });
const unknown = await client.POST("/v1/embeddings", { body: { model: "nowhere", input: "a" } });

const tokens: number = embedded.data!.usage.total_tokens;
console.log(JSON.stringify({
  vectors: embedded.data!.data.map((item) => item.embedding),
  tokens,
  best: ranked.data!.results[0]!.index,
  plain: plain.data![0],
  unknown: { status: unknown.response.status, error: unknown.error },
}));
