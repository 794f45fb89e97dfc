// Code of the first call of a key, for a shell, Python and TypeScript.
import type { Key } from "../../lib/tenants.ts";
import type { Model } from "../../lib/types.ts";

export interface SampleCall {
  model: string;
  operation: "embed" | "rerank";
}

// A call that the key may make; null if there is none, as with keys of operators.
export function sampleModel(key: Key, models: Model[]): SampleCall | null {
  const allowed = models.filter(({ name }) => key.models === null || key.models.includes(name));
  for (const operation of ["embed", "rerank"] as const) {
    if (key.scopes && !key.scopes.includes(operation)) continue;
    // One that is up comes first; before the first answer of a server its operations are not known.
    const fitting = allowed.filter(({ operations }) => operations.includes(operation));
    const chosen = fitting[0] ?? allowed.find(({ operations }) => !operations.length);
    if (chosen) return { model: chosen.name, operation };
  }
  return null;
}

const quoted = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(path: string, body: unknown, key: string) {
  return [
    `export GATEWAY_API_KEY=${quoted(key)}`,
    `curl ${quoted(location.origin + path)} \\`,
    '  -H "Authorization: Bearer $GATEWAY_API_KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join("\n");
}

export function firstCallSamples({ model, operation }: SampleCall, key: string): Record<string, string> {
  const { origin } = location;
  const name = JSON.stringify(model);
  if (operation === "embed") {
    return {
      curl: curl("/v1/embeddings", { model, input: "Hello, world" }, key),
      Python: `import os
from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=os.environ["GATEWAY_API_KEY"])
reply = client.embeddings.create(model=${name}, input="Hello, world")
print(len(reply.data[0].embedding))`,
      TypeScript: `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${origin}/v1", apiKey: process.env.GATEWAY_API_KEY });
const reply = await client.embeddings.create({ model: ${name}, input: "Hello, world" });
console.log(reply.data[0].embedding.length);`,
    };
  }
  const body = { model, query: "capital of France", documents: ["Paris", "Berlin"] };
  return {
    curl: curl("/v1/rerank", body, key),
    Python: `import os
import cohere

client = cohere.ClientV2(base_url="${origin}", api_key=os.environ["GATEWAY_API_KEY"])
reply = client.rerank(model=${name}, query="capital of France", documents=["Paris", "Berlin"])
print(reply.results[0].index, reply.results[0].relevance_score)`,
    TypeScript: `const reply = await fetch("${origin}/v1/rerank", {
  method: "POST",
  headers: { authorization: \`Bearer \${process.env.GATEWAY_API_KEY}\`, "content-type": "application/json" },
  body: ${quoted(JSON.stringify(body))},
});
console.log(await reply.json());`,
  };
}
