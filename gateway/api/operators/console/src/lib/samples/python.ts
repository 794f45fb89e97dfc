// Python: the client of OpenAI where a request is one of its calls, and httpx for all others.
import type { CallRequest } from "../../docs/request.ts";
import { fieldsOf } from "./form.ts";

const INDENT = "    ";
// What the client has as arguments; all else is its extra_body.
const ARGUMENTS = ["model", "input", "dimensions", "encoding_format", "user"];

export function pythonLiteral(value: unknown, indent = ""): string {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + INDENT;
  const isList = Array.isArray(value);
  const members = isList
    ? value.map((member) => pythonLiteral(member, inner))
    : Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${pythonLiteral(member, inner)}`);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const short = `${open}${members.join(", ")}${close}`;
  if (short.length + indent.length <= 80 && !short.includes("\n")) return short;
  return `${open}\n${members.map((member) => `${inner}${member},\n`).join("")}${indent}${close}`;
}

function openai(request: CallRequest, body: Record<string, unknown>): string {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !ARGUMENTS.includes(name)));
  const given = Object.entries(body).filter(([name]) => ARGUMENTS.includes(name));
  const lines = given.map(([name, value]) => `${INDENT}${name}=${pythonLiteral(value, INDENT)},\n`);
  if (Object.keys(extra).length) lines.push(`${INDENT}extra_body=${pythonLiteral(extra, INDENT)},\n`);
  return `# pip install openai
import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${request.base}/v1`)}, api_key=os.environ["GATEWAY_API_KEY"])
reply = client.embeddings.create(
${lines.join("")})
for item in reply.data:
    print(item.index, item.embedding[:4])`;
}

function httpx(request: CallRequest, body: unknown): string {
  const argument = [`${INDENT}${JSON.stringify(request.method)},\n`, `${INDENT}${JSON.stringify(request.base + request.path)},\n`];
  if (request.needsKey) argument.push(`${INDENT}headers={"Authorization": f"Bearer {os.environ['GATEWAY_API_KEY']}"},\n`);
  if (request.body !== null) argument.push(`${INDENT}json=${pythonLiteral(body, INDENT)},\n`);
  if (request.form) {
    const { texts, file } = fieldsOf(request.form);
    if (texts.length) argument.push(`${INDENT}data=${pythonLiteral(Object.fromEntries(texts), INDENT)},\n`);
    argument.push(`${INDENT}files={${JSON.stringify(file[0])}: open(${JSON.stringify(file[1])}, "rb")},\n`);
  }
  argument.push(`${INDENT}timeout=120,\n`);
  return `# pip install httpx
${request.needsKey ? "import os\n\n" : ""}import httpx

reply = httpx.request(
${argument.join("")})
reply.raise_for_status()
print(reply.text)`;
}

export function python(request: CallRequest): string {
  let body: unknown = null;
  try {
    body = request.body === null ? null : JSON.parse(request.body);
  } catch {
    return "# The body above is not JSON.";
  }
  const fields = typeof body === "object" && body !== null ? (body as Record<string, unknown>) : {};
  if (request.template === "/v1/embeddings" && "input" in fields && "model" in fields) return openai(request, fields);
  return httpx(request, body);
}
