// Requests for vectors, what they cost, and cosines.
import { RequestError, send } from "./api.ts";

// What a call took, as the playground shows it.
export interface CallFacts {
  // As this page saw it, and as the gateway reports it.
  elapsedMs: number;
  gatewayMs: number | null;
  tokens: number | null;
  truncated: number;
  vectors?: number;
  width?: number;
  space?: string | null;
}

export type Input = string | { image: string };

export interface Embedded extends CallFacts {
  rows: number[][];
}

// server-timing: total;dur=12.3, in milliseconds; else the sum of its stages.
export function gatewayMs(headers: Headers): number | null {
  const timing = headers.get("server-timing");
  if (!timing) return null;
  const durations = timing.split(",").map((part) => ({
    name: part.trim().split(";")[0] ?? "",
    ms: Number(/dur=([0-9.]+)/.exec(part)?.[1] ?? Number.NaN),
  }));
  const total = durations.find(({ name }) => name === "total");
  const known = durations.filter(({ ms }) => !Number.isNaN(ms));
  return total?.ms ?? (known.length ? known.reduce((sum, { ms }) => sum + ms, 0) : null);
}

// x-truncated-inputs: the number of texts that were cut, or their indices.
function truncatedOf(headers: Headers) {
  const text = headers.get("x-truncated-inputs");
  if (!text) return 0;
  return text.includes(",") ? text.split(",").length : Number(text) || 1;
}

export function factsOf(headers: Headers, elapsedMs: number, tokens: number | null): CallFacts {
  return { elapsedMs, gatewayMs: gatewayMs(headers), tokens, truncated: truncatedOf(headers) };
}

interface EmbeddingsReply {
  data: { embedding: number[] }[];
  usage: { total_tokens: number };
}

export async function embed(model: string, input: Input[], more: Record<string, unknown> = {}): Promise<Embedded> {
  const body = { model, input, encoding_format: "float", ...more };
  const { content, headers, elapsedMs } = await send<EmbeddingsReply>("/v1/embeddings", { body });
  const rows = content.data.map((item) => item.embedding);
  return {
    ...factsOf(headers, elapsedMs, content.usage.total_tokens),
    rows,
    vectors: rows.length,
    width: rows[0]?.length,
    space: headers.get("x-embedding-fingerprint"),
  };
}

// Of vectors that have length 1, this is the cosine.
export const product = (left: number[], right: number[]) =>
  left.reduce((sum, value, index) => sum + value * (right[index] ?? 0), 0);

export function cosine(left: number[], right: number[]) {
  const squares = product(left, left) * product(right, right);
  return squares ? product(left, right) / Math.sqrt(squares) : 0;
}

export const linesOf = (text: string) => text.split("\n").map((line) => line.trim()).filter(Boolean);

export function checkTexts(texts: unknown[], most: number) {
  if (!texts.length) throw new RequestError(0, "Write at least one text.");
  if (texts.length > most) throw new RequestError(0, `${texts.length} texts; at most ${most} here.`);
}

// A picture as a part of a request.
export function dataUri(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new RequestError(0, `${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
