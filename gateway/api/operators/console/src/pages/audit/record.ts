// A record of a change, as GET /admin/audit lists it, and its values as people read them.
import { get, withQuery } from "../../lib/api.ts";

export interface Change {
  field: string;
  was: unknown;
  is: unknown;
}

export interface AuditRecord {
  id: string;
  // RFC 3339 in UTC.
  time: string;
  actor: string;
  actor_kind: string;
  address: string;
  action: string;
  // Its kind and its name, as in tenant/acme.
  object: string;
  changes: Change[];
  request_id: string;
  gateway: string;
  // Of a changed or removed tenant: the body with which its settings are again what they were.
  restore?: Record<string, unknown> | null;
}

export interface AuditPage {
  data: AuditRecord[];
  next: string | null;
}

export const ACTIONS = [
  "create",
  "change",
  "remove",
  "revoke",
  "rotate",
  "restore",
  "drain",
  "undrain",
  "reload",
  "start",
  "stop",
  "cancel",
];
export const PAGE_RECORDS = 50;
const TIMEOUT_MS = 20_000;

export type AuditFilter = Record<string, string | null>;

export const readPage = (filter: AuditFilter, cursor: string | null, limit = PAGE_RECORDS) =>
  get<AuditPage>(withQuery("/admin/audit", { ...filter, cursor, limit }), TIMEOUT_MS);

export const timeOf = (record: AuditRecord) => Date.parse(record.time) / 1000;

// A value as text: numbers with separators, a list by its items, "not set" for null.
export function valueText(value: unknown): string {
  if (value === null || value === undefined) return "not set";
  if (typeof value === "number") return value.toLocaleString("en");
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value === "" ? "empty" : value;
  if (Array.isArray(value)) return value.length ? value.map(valueText).join(", ") : "empty";
  return JSON.stringify(value);
}

// limits.tokens_per_day → limit tokens per day. Names of models stay as they are.
export function fieldText(field: string) {
  const ofModel = /^model_limits\.(.+)\.([^.]+)$/.exec(field);
  if (ofModel) return `limit ${ofModel[2]!.replaceAll("_", " ")} of ${ofModel[1]}`;
  return field.replace(/^limits\./, "limit ").replaceAll("_", " ").replace(/^end user limits\./, "limit of each end user: ");
}

// The kind and the name of an object.
export function objectParts(object: string): [kind: string, name: string] {
  const at = object.indexOf("/");
  return at < 0 ? [object, ""] : [object.slice(0, at), object.slice(at + 1)];
}
