// Names and values of recorded fields, as people read them.
import { count } from "./format.ts";
import { limitTitle } from "./limits.ts";

// model_limits.bge.tokens_per_day → tokens per day of bge.
export function fieldTitle(field: string) {
  const own = /^limits\.([a-z_]+)$/.exec(field);
  if (own) return limitTitle(own[1]!);
  const user = /^end_user_limits\.([a-z_]+)$/.exec(field);
  if (user) return `${limitTitle(user[1]!)} of each end user`;
  const model = /^model_limits\.(.+)\.([a-z_]+)$/s.exec(field);
  if (model) return `${limitTitle(model[2]!)} of ${model[1]}`;
  return field.replaceAll("_", " ");
}

export function fieldValue(value: unknown): string {
  if (value === null || value === undefined) return "not set";
  if (typeof value === "number") return count(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.length ? value.map(fieldValue).join(", ") : "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}
