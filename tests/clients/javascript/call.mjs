// Calls the gateway with one client, and prints what it returned as JSON.
// Usage: node call.mjs CLIENT, with GATEWAY, KEY, MODEL and GRPC in the environment.
import { createTogetherAI } from "@ai-sdk/togetherai";
import { InferenceClient } from "@huggingface/inference";
import { Mistral } from "@mistralai/mistralai";
import { embedMany, rerank } from "ai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import OpenAI, { toFile } from "openai";
import { VoyageAIClient } from "voyageai";

const { GATEWAY, KEY, MODEL } = process.env;
const texts = ["an apple", "the sea"];
const documents = ["a car", "an apple", "the sea"];

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? error.statusCode, message: error.message };
  }
  return null;
}

const clients = {
  async openai() {
    const client = new OpenAI({ baseURL: `${GATEWAY}/v1`, apiKey: KEY, maxRetries: 0 });
    const stranger = new OpenAI({ baseURL: `${GATEWAY}/v1`, apiKey: "nobody", maxRetries: 0 });
    const reply = await client.embeddings.create({ model: MODEL, input: texts });
    const floats = await client.embeddings.create({ model: MODEL, input: texts[0], encoding_format: "float" });
    const small = await client.embeddings.create({ model: MODEL, input: texts, dimensions: 64 });
    const models = [];
    for await (const model of client.models.list()) models.push(model.id);
    return {
      vectors: reply.data.map((item) => item.embedding),
      floats: floats.data[0].embedding,
      widths: small.data.map((item) => item.embedding.length),
      tokens: reply.usage.total_tokens,
      models,
      unknown: await failure(() => client.embeddings.create({ model: "nowhere", input: "a" })),
      stranger: await failure(() => stranger.embeddings.create({ model: MODEL, input: "a" })),
    };
  },

  async batches() {
    const client = new OpenAI({ baseURL: `${GATEWAY}/v1`, apiKey: KEY, maxRetries: 0 });
    const upload = async (bodies) => {
      const lines = bodies.map((body, index) => JSON.stringify({
        custom_id: `id-${index}`, method: "POST", url: "/v1/embeddings", body: { model: MODEL, ...body },
      }));
      return client.files.create({
        file: await toFile(Buffer.from(lines.join("\n")), "input.jsonl"), purpose: "batch",
      });
    };
    const create = (file) => client.batches.create({
      input_file_id: file.id, endpoint: "/v1/embeddings", completion_window: "24h", metadata: { night: "1" },
    });
    const ended = async ({ id }) => {
      const batch = await client.batches.retrieve(id);
      if (!["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status)) return batch;
      await new Promise((done) => setTimeout(done, 100));
      return ended(batch);
    };
    const content = async (id) => (await (await client.files.content(id)).text()).trim().split("\n").map(JSON.parse);
    // The model has not as many dimensions as the last line asks for.
    const file = await upload([...texts.map((input) => ({ input })), { input: "a", dimensions: 4096 }]);
    const batch = await ended(await create(file));
    const results = await content(batch.output_file_id);
    const errors = await content(batch.error_file_id);
    // More lines than run before the cancellation.
    const long = await create(await upload(Array(20000).fill({ input: "an apple" })));
    const cancelling = await client.batches.cancel(long.id);
    const cancelled = await ended(long);
    const unexecuted = (await content(cancelled.error_file_id)).map(({ error }) => error.code);
    const batches = [];
    for await (const { id } of client.batches.list({ limit: 1 })) batches.push(id);
    const files = [];
    for await (const { id } of client.files.list({ purpose: "batch" })) files.push(id);
    return {
      status: batch.status,
      counts: batch.request_counts,
      metadata: batch.metadata,
      file: await client.files.retrieve(file.id),
      errors: errors.map(({ custom_id, response }) => [custom_id, response.status_code, response.request_id !== ""]),
      cancelling: cancelling.status,
      cancelled: cancelled.status,
      lines: [cancelled.request_counts.completed + unexecuted.length, [...new Set(unexecuted)]],
      ids: results.map((result) => result.custom_id),
      vectors: results.map((result) => result.response.body.data[0].embedding),
      listed: batches.includes(batch.id) && files.includes(file.id),
      deleted: (await client.files.delete(file.id)).deleted,
      unknown: await failure(() => client.batches.retrieve("batch_unknown")),
      late: await failure(() => client.batches.cancel(batch.id)),
    };
  },

  async cohere() {
    const client = new CohereClientV2({ token: KEY, environment: GATEWAY });
    const reply = await client.embed({
      model: MODEL, texts, inputType: "search_document", embeddingTypes: ["float", "int8"],
    });
    const ranks = await client.rerank({ model: MODEL, query: "fruit", documents, topN: 2 });
    const first = (token) => new CohereClient({ token, environment: GATEWAY });
    return {
      key: await first(KEY).checkApiKey(),
      stranger: await failure(() => first("nobody").checkApiKey({ maxRetries: 0 })),
      vectors: reply.embeddings.float,
      bytes: reply.embeddings.int8.map((row) => row.length),
      ranks: ranks.results.map((rank) => rank.index),
      unknown: await failure(() => client.embed(
        { model: "nowhere", texts, inputType: "search_query", embeddingTypes: ["float"] }, { maxRetries: 0 },
      )),
    };
  },

  async huggingface() {
    const client = new InferenceClient(KEY).endpoint(`${GATEWAY}/models/${MODEL}`);
    const stranger = new InferenceClient("nobody").endpoint(`${GATEWAY}/models/${MODEL}`);
    return {
      vectors: await client.featureExtraction({ inputs: texts }),
      similarities: await client.sentenceSimilarity({
        inputs: { source_sentence: "fruit", sentences: documents },
      }),
      stranger: await failure(() => stranger.featureExtraction({ inputs: texts })),
    };
  },

  async mistral() {
    const client = new Mistral({ apiKey: KEY, serverURL: GATEWAY });
    const reply = await client.embeddings.create({ model: MODEL, inputs: texts });
    return {
      vectors: reply.data.map((item) => item.embedding),
      id: reply.id,
      usage: reply.usage,
      models: (await client.models.list()).data.map(({ id, type }) => [id, type]),
      model: (await client.models.retrieve({ modelId: MODEL })).maxContextLength,
      unknown: await failure(() => client.embeddings.create({ model: "nowhere", inputs: texts })),
    };
  },

  async ollama() {
    const client = new Ollama({ host: GATEWAY, headers: { authorization: `Bearer ${KEY}` } });
    const reply = await client.embed({ model: MODEL, input: texts });
    const old = await client.embeddings({ model: MODEL, prompt: texts[0] });
    return {
      vectors: reply.embeddings,
      old: old.embedding,
      models: (await client.list()).models.map((model) => model.name),
      unknown: await failure(() => client.embed({ model: "nowhere", input: texts })),
    };
  },

  async together() {
    const provider = createTogetherAI({ baseURL: `${GATEWAY}/v1`, apiKey: KEY });
    const { embeddings } = await embedMany({ model: provider.embeddingModel(MODEL), values: texts, maxRetries: 0 });
    const reply = await rerank({
      model: provider.reranking(MODEL), query: "fruit", documents, topN: 2, maxRetries: 0,
    });
    return { vectors: embeddings, ranks: reply.ranking.map(({ originalIndex, document }) => [originalIndex, document]) };
  },

  async voyage() {
    const client = new VoyageAIClient({ apiKey: KEY, environment: `${GATEWAY}/v1` });
    const reply = await client.embed({ model: MODEL, input: texts, inputType: "document" });
    const ranks = await client.rerank({ model: MODEL, query: "fruit", documents, topK: 2 });
    return {
      vectors: reply.data.map((item) => item.embedding),
      tokens: reply.usage.totalTokens,
      ranks: ranks.data.map((rank) => rank.index),
      all: (await client.rerank({ model: MODEL, query: "fruit", documents })).data.map((rank) => rank.index),
      texts: (await client.rerank({ model: MODEL, query: "fruit", documents, returnDocuments: true })).data,
      unknown: await failure(() => client.embed({ model: "nowhere", input: texts }, { maxRetries: 0 })),
    };
  },
};

console.log(JSON.stringify(await clients[process.argv[2]]()));
