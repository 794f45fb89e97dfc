// Names of the models that the typed key may use, for the forms. The examples name models of the documentation.
import { PLACEHOLDER, workOf } from "./request.ts";

const TIMEOUT_MS = 10_000;

export interface ServedModel {
  id: string;
  operations?: string[];
  default_for?: string[];
}

let known: { key: string; models: Promise<ServedModel[]> } | null = null;
// Those that no person typed: others may take their place.
const automatic = new Set([PLACEHOLDER]);

async function read(base: string, key: string): Promise<ServedModel[]> {
  try {
    const reply = await fetch(`${base}/v1/models`, {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (reply.ok) return (await reply.json()).data;
    // A refused key stays refused: asking again would count as another attempt.
    if (reply.status < 500) return [];
  } catch {
    // A list of names only helps; the reply to the form says what is wrong.
  }
  if (known?.key === key) known = null;
  return [];
}

export function modelsFor(base: string, key: string): Promise<ServedModel[]> {
  if (known?.key !== key) known = { key, models: read(base, key) };
  return known.models;
}

export const servedFor = (models: ServedModel[], path: string) =>
  models.filter(({ operations }) => (operations ?? []).includes(workOf(path))).map(({ id }) => id);

// The body with a served model, that of the config's defaults if it names one, in place of the example.
export function withModel(body: string, models: ServedModel[], path: string): string {
  const preferred = models.find((model) => model.default_for?.includes(workOf(path)))?.id;
  const chosen = preferred ?? servedFor(models, path)[0];
  if (!chosen) return body;
  const ids = new Set(models.map(({ id }) => id));
  return body.replace(/"model":\s*"(models\/)?([^"\\]*)"/g, (whole, prefix: string | undefined, name: string) => {
    if (ids.has(name) || !automatic.has(name)) return whole;
    automatic.add(chosen);
    return `"model": ${JSON.stringify((prefix ?? "") + chosen)}`;
  });
}
