// Names of the models that the typed key may use, for the forms. The examples name models of the documentation.
import { workOf } from "./request.ts";

const TIMEOUT_MS = 10_000;

export interface ServedModel {
  id: string;
  operations?: string[];
}

let known: { key: string; models: Promise<ServedModel[]> } | null = null;

async function read(base: string, key: string): Promise<ServedModel[]> {
  try {
    const reply = await fetch(`${base}/v1/models`, {
      headers: { authorization: `Bearer ${key}` },
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    return reply.ok ? (await reply.json()).data : [];
  } catch {
    // A list of names only helps; the reply to the form says what is wrong.
    return [];
  }
}

export function modelsFor(base: string, key: string): Promise<ServedModel[]> {
  if (known?.key !== key) known = { key, models: read(base, key) };
  return known.models;
}

export const servedFor = (models: ServedModel[], path: string) =>
  models.filter(({ operations }) => (operations ?? []).includes(workOf(path))).map(({ id }) => id);

// The body with a served model in place of one that this gateway does not have.
export function withModel(body: string, models: ServedModel[], path: string): string {
  const [first] = servedFor(models, path);
  if (!first) return body;
  const ids = new Set(models.map(({ id }) => id));
  return body.replace(/"model":\s*"(models\/)?([^"\\]*)"/g, (whole, prefix: string | undefined, name: string) =>
    ids.has(name) ? whole : `"model": ${JSON.stringify((prefix ?? "") + first)}`,
  );
}
