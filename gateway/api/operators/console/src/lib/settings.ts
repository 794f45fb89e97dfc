// Settings of a tenant as fields of their own, as the audit records them; and patches of them (RFC 7396).
import type { Settings } from "./tenants.ts";

export interface ChangedField {
  // With the names of limits, as in limits.tokens_per_day.
  field: string;
  was: unknown;
  is: unknown;
}

type Patch = Record<string, unknown>;
// A model may have any name, also one that every object has a meaning for, such as __proto__.
const put = (target: Patch, name: string, value: unknown) =>
  Object.defineProperty(target, name, { value, configurable: true, enumerable: true, writable: true });
const LIMIT_FIELDS = /^(limits|end_user_limits)\.([a-z_]+)$/;
// A model's name may have points; that of a limit has none.
const MODEL_FIELD = /^model_limits\.(.+)\.([a-z_]+)$/s;
const PLAIN_FIELDS = ["models", "weight", "priority", "queue_tokens", "join", "certificates"];

function fieldsOf(settings: Settings): Record<string, unknown> {
  const { limits, model_limits, end_user_limits, certificates, ...plain } = settings;
  const named = (prefix: string, of: object) => Object.entries(of).map(([name, amount]) => [`${prefix}.${name}`, amount]);
  return {
    ...plain,
    certificates: certificates.length ? certificates : null,
    ...Object.fromEntries([
      ...named("limits", limits),
      ...Object.entries(model_limits).flatMap(([model, of]) => named(`model_limits.${model}`, of)),
      ...named("end_user_limits", end_user_limits),
    ]),
  };
}

const isEqual = (one: unknown, other: unknown) => JSON.stringify(one ?? null) === JSON.stringify(other ?? null);

export function differences(before: Settings, after: Settings): ChangedField[] {
  const [was, is] = [fieldsOf(before), fieldsOf(after)];
  return [...new Set([...Object.keys(was), ...Object.keys(is)])]
    .filter((field) => !isEqual(was[field], is[field]))
    .map((field) => ({ field, was: was[field] ?? null, is: is[field] ?? null }));
}

// The names under which a patch sets a field; null for one that no patch has.
function place(field: string): string[] | null {
  if (PLAIN_FIELDS.includes(field)) return [field];
  const own = LIMIT_FIELDS.exec(field);
  if (own) return [own[1]!, own[2]!];
  const of = MODEL_FIELD.exec(field);
  return of ? ["model_limits", of[1]!, of[2]!] : null;
}

// The patch that makes these changes.
export function patchOf(changes: ChangedField[]): Patch {
  const patch: Patch = {};
  for (const change of changes) {
    const path = place(change.field);
    if (!path) continue;
    let at = patch;
    for (const name of path.slice(0, -1)) {
      if (!Object.hasOwn(at, name)) put(at, name, {});
      at = at[name] as Patch;
    }
    put(at, path.at(-1)!, change.is ?? null);
  }
  return patch;
}

// Applies a patch to settings, whose fields without a value get their defaults.
export function merged(settings: Settings, patch: Patch): Settings {
  const merge = (target: unknown, by: unknown): unknown => {
    if (by === null || typeof by !== "object" || Array.isArray(by)) return by;
    const result: Patch = target !== null && typeof target === "object" ? { ...target } : {};
    for (const [name, value] of Object.entries(by)) {
      if (value === null) delete result[name];
      else put(result, name, merge(Object.hasOwn(result, name) ? result[name] : undefined, value));
    }
    return result;
  };
  return { ...EMPTY, ...(merge(settings, patch) as Partial<Settings>) };
}

export const EMPTY: Settings = {
  models: null,
  limits: {},
  model_limits: {},
  end_user_limits: {},
  weight: 1,
  priority: "interactive",
  queue_tokens: null,
  join: true,
  certificates: [],
};
