// Upstreams and models that operators added to those of router.yaml, and what an edit or a reload has changed.
import { get, named, RequestError, send } from "./api.ts";
import { type Loaded, useLoad } from "./load.ts";

const REFRESH_INTERVAL_MS = 10_000;

export type Part = "upstreams" | "models";

export interface Addition {
  name: string;
  settings: Record<string, unknown>;
  // Why it is not in use.
  problem: string | null;
}

export interface Change {
  path: string;
  how: "added" | "removed" | "changed";
  // old → new
  detail: string;
}

export interface ChangeReport {
  changes: Change[];
  needs_restart: Change[];
}

export interface Additions extends Loaded<Addition[]> {
  // This gateway keeps additions at all.
  isOffered: boolean;
  find: (name: string) => Addition | undefined;
}

export function useAdditions(part: Part): Additions {
  const loaded = useLoad(() => get<Addition[]>(`/admin/${part}`), REFRESH_INTERVAL_MS, part);
  return {
    ...loaded,
    isOffered: loaded.problem?.status !== 404,
    find: (name) => loaded.content?.find((addition) => addition.name === name),
  };
}

export const putAddition = async (part: Part, name: string, settings: Record<string, unknown>) =>
  (await send<ChangeReport>(named(`/admin/${part}`, name), { method: "PUT", body: settings })).content;

export const removeAddition = async (part: Part, name: string) =>
  (await send<ChangeReport>(named(`/admin/${part}`, name), { method: "DELETE" })).content;

export const reloadFile = async () => (await send<ChangeReport>("/admin/reload", { method: "POST" })).content;

// An object written as JSON; {} for an empty text. param of the failure: "more".
export function parsedSettings(text: string): Record<string, unknown> {
  if (!text.trim()) return {};
  let settings: unknown;
  try {
    settings = JSON.parse(text);
  } catch (error) {
    throw new RequestError(0, `not JSON: ${(error as Error).message}`, "more");
  }
  if (typeof settings !== "object" || settings === null || Array.isArray(settings)) {
    throw new RequestError(0, 'an object is expected, such as {"tokenizer": "BAAI/bge-m3"}', "more");
  }
  return settings as Record<string, unknown>;
}

// All settings but those that have a field of their own, as text for a form.
export function furtherSettings(settings: Record<string, unknown>, own: string[]) {
  const more = Object.fromEntries(Object.entries(settings).filter(([key]) => !own.includes(key)));
  return Object.keys(more).length ? JSON.stringify(more, null, 2) : "";
}
