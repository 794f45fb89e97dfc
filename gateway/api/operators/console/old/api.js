// Requests to the gateway. The API key stays in a variable of this module, never in storage, a cookie or an
// address.
export const STATUS_TIMEOUT_MS = 5000;
const CALL_TIMEOUT_MS = 120000;

let key = "";

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text;
}

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    // Nothing has gone wrong: no key has been typed yet.
    this.isKeyMissing = status === 401 && !key;
  }
}

function reasonOf(status, content) {
  if (status === 401 && !key) return "Type an API key above.";
  return String(content?.error?.message ?? content?.message ?? content?.error ?? `status ${status}`);
}

// options: method, body (sent as JSON), headers, timeoutMs, as ("json" or "text").
export async function send(path, { method, body, headers: own, timeoutMs = CALL_TIMEOUT_MS, as = "json" } = {}) {
  const headers = { ...own, accept: as === "json" ? "application/json" : "*/*" };
  if (!/^[!-~]*$/.test(key)) throw new RequestError(0, "a key is of plain letters, digits and signs, without spaces");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(timeoutMs),
    });
  } catch (error) {
    throw new RequestError(0, error.name === "TimeoutError" ? "no answer in time" : "the gateway does not answer");
  }
  const text = await reply.text().catch(() => "");
  if (reply.ok && as === "text") return { content: text, headers: reply.headers };
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    if (reply.ok) throw new RequestError(0, "this page does not understand the reply");
  }
  if (!reply.ok) throw new RequestError(reply.status, reasonOf(reply.status, content));
  return { content, headers: reply.headers };
}

export const named = (path, name) => `${path}/${encodeURIComponent(name)}`;

// Lets the browser write a text to a file.
export function saveFile(text, type, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
