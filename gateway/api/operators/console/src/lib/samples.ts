// Code that sends a call, for a shell, Python, TypeScript, Go and Java. The key is a variable of the environment.
const LONG = 20;

const shell = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;
// JSON is also Python, TypeScript, Go and Java for texts and numbers.
const literal = (value: unknown) => JSON.stringify(value, null, Array.isArray(value) && value.length > 1 ? 4 : 0);
const hasExtra = (more: object) => Object.keys(more).length > 0;

function curl(path: string, body: unknown) {
  return [
    `curl ${shell(location.origin + path)} \\`,
    '  -H "Authorization: Bearer $GATEWAY_API_KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    `  -d ${shell(JSON.stringify(body))}`,
  ].join("\n");
}

function goCode(path: string, body: unknown) {
  return `package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	body := strings.NewReader(${JSON.stringify(JSON.stringify(body))})
	request, err := http.NewRequest("POST", ${JSON.stringify(location.origin + path)}, body)
	if err != nil {
		panic(err)
	}
	request.Header.Set("Authorization", "Bearer "+os.Getenv("GATEWAY_API_KEY"))
	request.Header.Set("Content-Type", "application/json")
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		panic(err)
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	fmt.Println(reply.Status, string(text), err)
}`;
}

function javaCode(path: string, body: unknown) {
  return `import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

public class Call {
  public static void main(String[] arguments) throws Exception {
    var request = HttpRequest.newBuilder(URI.create(${JSON.stringify(location.origin + path)}))
        .header("Authorization", "Bearer " + System.getenv("GATEWAY_API_KEY"))
        .header("Content-Type", "application/json")
        .POST(HttpRequest.BodyPublishers.ofString(${JSON.stringify(JSON.stringify(body))}))
        .build();
    var reply = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
    System.out.println(reply.statusCode() + " " + reply.body());
  }
}`;
}

function fetchCode(path: string, body: unknown) {
  return `const reply = await fetch(${JSON.stringify(location.origin + path)}, {
  method: "POST",
  headers: { authorization: \`Bearer \${process.env.GATEWAY_API_KEY}\`, "content-type": "application/json" },
  body: JSON.stringify(${literal(body)}),
});
console.log(reply.status, await reply.json());`;
}

export type Samples = Record<string, string>;

export function embedCode(model: string, texts: string[], more: Record<string, unknown> = {}): Samples {
  const input = texts.slice(0, LONG);
  const body = { model, input, ...more };
  const base = JSON.stringify(`${location.origin}/v1`);
  const extra = hasExtra(more) ? `, extra_body=${JSON.stringify(more)}` : "";
  const extraFields = hasExtra(more) ? `, ...(${JSON.stringify(more)} as object)` : "";
  return {
    curl: curl("/v1/embeddings", body),
    Python: `import os
from openai import OpenAI

client = OpenAI(base_url=${base}, api_key=os.environ["GATEWAY_API_KEY"])
reply = client.embeddings.create(model=${literal(model)}, input=${literal(input)}${extra})
print(len(reply.data), len(reply.data[0].embedding))`,
    TypeScript: `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${base}, apiKey: process.env.GATEWAY_API_KEY });
const reply = await client.embeddings.create({ model: ${literal(model)}, input: ${literal(input)}${extraFields} });
console.log(reply.data.length, reply.data[0].embedding.length);`,
    Go: goCode("/v1/embeddings", body),
    Java: javaCode("/v1/embeddings", body),
  };
}

export function rerankCode(model: string, query: string, texts: string[]): Samples {
  const documents = texts.slice(0, LONG);
  const body = { model, query, documents };
  return {
    curl: curl("/v1/rerank", body),
    Python: `import os
import cohere

client = cohere.ClientV2(base_url=${JSON.stringify(location.origin)}, api_key=os.environ["GATEWAY_API_KEY"])
reply = client.rerank(model=${literal(model)}, query=${literal(query)}, documents=${literal(documents)})
for result in reply.results:
    print(result.index, result.relevance_score)`,
    TypeScript: fetchCode("/v1/rerank", body),
    Go: goCode("/v1/rerank", body),
    Java: javaCode("/v1/rerank", body),
  };
}
