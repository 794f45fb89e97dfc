// Requests to the gateway that the page came from. A refused key signs the tab out.
import { currentKey, hasKey, setKey } from "./session.ts";

export const STATUS_TIMEOUT_MS = 5000;
const CALL_TIMEOUT_MS = 120_000;

export class RequestError extends Error {
  // Nothing has gone wrong: there is no key yet.
  readonly isKeyMissing: boolean;

  // status: 0 if there was no answer. param: the field that the gateway names.
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
    readonly kind: string | null = null,
  ) {
    super(message);
    this.isKeyMissing = status === 401 && !hasKey();
  }
}

interface ErrorBody {
  error?: { message?: string; param?: string | null; code?: string | null } | string;
  message?: string;
  error_type?: string;
}

// The field that a message names, where the body has no place for it: "(at weight)", or "expires: ..." in front.
const fieldIn = (message: string) =>
  /\(at ([a-z_]+)[^()]*\)$/.exec(message)?.[1] ?? /^([a-z][a-z_-]*): /.exec(message)?.[1] ?? null;

function failureOf(status: number, content: ErrorBody | null): RequestError {
  const error = content?.error;
  const nested = typeof error === "object" ? error : undefined;
  const message = nested?.message ?? content?.message ?? (typeof error === "string" ? error : `status ${status}`);
  return new RequestError(status, String(message), nested?.param ?? fieldIn(String(message)), nested?.code ?? content?.error_type ?? null);
}

export interface Options {
  method?: string;
  // Sent as JSON.
  body?: unknown;
  // Sent as it is, in place of `body`.
  raw?: BodyInit;
  headers?: Record<string, string>;
  timeoutMs?: number;
  as?: "json" | "text";
  signal?: AbortSignal;
}

export interface Reply<T> {
  content: T;
  headers: Headers;
  // Between sending and the last byte, as this page saw it.
  elapsedMs: number;
}

export async function send<T = any>(path: string, options: Options = {}): Promise<Reply<T>> {
  const key = currentKey();
  const headers: Record<string, string> = { ...options.headers, accept: options.as === "text" ? "*/*" : "application/json" };
  if (!/^[!-~]*$/.test(key)) throw new RequestError(0, "a key is of plain letters, digits and signs, without spaces");
  if (key) headers.authorization = `Bearer ${key}`;
  if (options.body !== undefined) headers["content-type"] = "application/json";
  const timeout = AbortSignal.timeout(options.timeoutMs ?? CALL_TIMEOUT_MS);
  const startedMs = performance.now();
  let reply: Response;
  let text: string;
  try {
    reply = await fetch(path, {
      method: options.method ?? (options.body === undefined && options.raw === undefined ? "GET" : "POST"),
      headers,
      body: options.body === undefined ? options.raw : JSON.stringify(options.body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: options.signal ? AbortSignal.any([timeout, options.signal]) : timeout,
    });
    text = await reply.text();
  } catch (error) {
    const isLate = error instanceof DOMException && error.name === "TimeoutError";
    throw new RequestError(0, isLate ? "no answer in time" : "the gateway does not answer");
  }
  const elapsedMs = performance.now() - startedMs;
  if (reply.ok && options.as === "text") return { content: text as T, headers: reply.headers, elapsedMs };
  let content: any = null;
  try {
    content = text ? JSON.parse(text) : null;
  } catch {
    if (reply.ok) throw new RequestError(0, "this page does not understand the reply");
  }
  if (!reply.ok) {
    const failure = failureOf(reply.status, content);
    // Only for the key that was sent: another may have been typed meanwhile.
    if (reply.status === 401 && key && key === currentKey()) setKey("", failure.message);
    throw failure;
  }
  return { content, headers: reply.headers, elapsedMs };
}

export const get = async <T = any>(path: string, timeoutMs = STATUS_TIMEOUT_MS): Promise<T> =>
  (await send<T>(path, { timeoutMs })).content;

// A path with a name of a tenant, key or model in it.
export const named = (path: string, name: string, rest = "") => `${path}/${encodeURIComponent(name)}${rest}`;

// A path with those parameters that have a value.
export function withQuery(path: string, query: Record<string, string | number | boolean | null | undefined>) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return text ? `${path}?${text}` : path;
}
