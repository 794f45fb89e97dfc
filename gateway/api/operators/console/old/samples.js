// Code that sends the call of a form, for a shell, Python and TypeScript. The key is a variable of the environment.
const LONG = 20;

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(path, body) {
  return [
    `curl ${shell(location.origin + path)} \\`,
    '  -H "Authorization: Bearer $GATEWAY_API_KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    `  -d ${shell(JSON.stringify(body))}`,
  ].join("\n");
}

// JSON is also Python and TypeScript for texts, numbers and lists of them.
const literal = (value) => JSON.stringify(value, null, Array.isArray(value) && value.length > 1 ? 4 : 0);

export function embedCode(model, texts, more = {}) {
  const input = texts.slice(0, LONG);
  const base = `${location.origin}/v1`;
  const extra = Object.keys(more).length ? `, extra_body=${JSON.stringify(more)}` : "";
  const extraFields = Object.keys(more).length ? `, ...(${JSON.stringify(more)} as object)` : "";
  return {
    curl: curl("/v1/embeddings", { model, input, ...more }),
    Python: `import os
from openai import OpenAI

client = OpenAI(base_url=${literal(base)}, api_key=os.environ["GATEWAY_API_KEY"])
reply = client.embeddings.create(model=${literal(model)}, input=${literal(input)}${extra})
print(len(reply.data), len(reply.data[0].embedding))`,
    TypeScript: `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${literal(base)}, apiKey: process.env.GATEWAY_API_KEY });
const reply = await client.embeddings.create({ model: ${literal(model)}, input: ${literal(input)}${extraFields} });
console.log(reply.data.length, reply.data[0].embedding.length);`,
  };
}

export function rerankCode(model, query, texts) {
  const documents = texts.slice(0, LONG);
  const base = location.origin;
  return {
    curl: curl("/v1/rerank", { model, query, documents }),
    Python: `import os
import cohere

client = cohere.ClientV2(base_url=${literal(base)}, api_key=os.environ["GATEWAY_API_KEY"])
reply = client.rerank(model=${literal(model)}, query=${literal(query)}, documents=${literal(documents)})
for result in reply.results:
    print(result.index, result.relevance_score)`,
    TypeScript: `const reply = await fetch(${literal(`${base}/v1/rerank`)}, {
  method: "POST",
  headers: { authorization: \`Bearer \${process.env.GATEWAY_API_KEY}\`, "content-type": "application/json" },
  body: JSON.stringify({ model: ${literal(model)}, query: ${literal(query)}, documents: ${literal(documents)} }),
});
console.log(await reply.json());`,
  };
}
