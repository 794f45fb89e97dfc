// Sends a request of the form, and reads the reply as text.
import { jsonText } from "./json-text.ts";
import type { CallRequest } from "./request.ts";
import { FormError } from "./request.ts";

const TIMEOUT_MS = 120_000;
const SHOWN_CHARACTERS = 20_000;

export interface ShownReply {
  status: number;
  statusText: string;
  elapsedMs: number;
  headers: [string, string][];
  text: string;
}

async function textOf(reply: Response): Promise<string> {
  const type = reply.headers.get("content-type") ?? "";
  if (!/json|text|javascript|xml/.test(type)) return `${(await reply.arrayBuffer()).byteLength} bytes of ${type || "no type"}`;
  let text = await reply.text();
  try {
    if (type.includes("json")) text = jsonText(JSON.parse(text));
  } catch {
    // Shown as it came.
  }
  return text.length > SHOWN_CHARACTERS ? `${text.slice(0, SHOWN_CHARACTERS)}\n… ${text.length} characters` : text;
}

function bodyOf({ body, form }: CallRequest): BodyInit | undefined {
  if (form) {
    const data = new FormData();
    for (const [name, value] of Object.entries(form)) if (value !== "") data.append(name, value);
    return data;
  }
  return body ?? undefined;
}

export async function sendRequest(request: CallRequest, key: string): Promise<ShownReply> {
  if (!/^[!-~]*$/.test(key)) throw new FormError("a key is of plain letters, digits and signs, without spaces");
  const headers: Record<string, string> = {};
  if (key && request.needsKey) headers.authorization = `Bearer ${key}`;
  if (request.body !== null) headers["content-type"] = "application/json";
  const startedMs = performance.now();
  try {
    const reply = await fetch(request.base + request.path, {
      method: request.method,
      headers,
      body: bodyOf(request),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const text = await textOf(reply);
    const elapsedMs = performance.now() - startedMs;
    return { status: reply.status, statusText: reply.statusText, elapsedMs, headers: [...reply.headers], text };
  } catch (error) {
    const isLate = error instanceof DOMException && error.name === "TimeoutError";
    throw new FormError(isLate ? "no reply in time" : "the gateway does not answer");
  }
}
