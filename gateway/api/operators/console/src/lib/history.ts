// History of traffic and replicas, which the gateway keeps for 90 days.
import { get, withQuery } from "./api.ts";
import { useLoad } from "./load.ts";
import type { Range } from "./range.ts";

// Traffic of one interval; all but the time is null where no gateway counted.
export interface HistoryPoint {
  // Start of the interval.
  at_s: number;
  calls: number | null;
  // Calls that ended with an error, with those that limits refused.
  failed: number | null;
  // By kind of error. Empty in the history of one model or tenant.
  failures: Record<string, number> | null;
  refused: number | null;
  tokens: number | null;
  cost: number | null;
  // Of interactive calls.
  p50_s: number | null;
  p95_s: number | null;
  p99_s: number | null;
}

export interface History {
  from_s: number;
  // End of the last interval, which may lie ahead.
  until_s: number;
  step_s: number;
  kept: "redis" | "state_dir" | "memory";
  currency: string | null;
  points: HistoryPoint[];
}

export interface TopRow {
  name: string;
  calls: number;
  failed: number;
  refused: number;
  tokens: number;
  cost: number;
  p50_s: number | null;
  p95_s: number | null;
  // The metric in each interval.
  points: (number | null)[];
}

export interface Top {
  from_s: number;
  until_s: number;
  step_s: number;
  by: TopBy;
  data: TopRow[];
  // Number of those that are not listed.
  others: number;
  // The metric of them together; null for p95.
  others_total?: number | null;
  // The metric of calls that belong to none: refused before their body was read; null for p95.
  unnamed_total?: number | null;
  currency?: string | null;
}

export type TopBy = "model" | "tenant";
export type TopMetric = "calls" | "tokens" | "cost" | "failed" | "p95";

export interface ReplicaSpan {
  from_s: number;
  // Null while it lasts.
  until_s: number | null;
  state: string;
  reason: string;
}

export interface ReplicaHistory {
  from_s: number;
  until_s: number;
  data: { upstream: string; replica: string; spans: ReplicaSpan[] }[];
}

const READ_TIMEOUT_MS = 20_000;

// Reads again and again as long as the range moves with the time.
function useRead<T>(path: string, range: Range) {
  return useLoad(() => get<T>(path, READ_TIMEOUT_MS), range.refreshMs, path);
}

// model, tenant: the calls of one only. path: "/usage/history" for those of the key's own tenant.
export const useHistory = (
  range: Range,
  { model, tenant, path = "/admin/history" }: { model?: string; tenant?: string; path?: string } = {},
) => useRead<History>(withQuery(path, { ...range.query, model, tenant }), range);

// The models or tenants with the most of a metric.
export const useTop = (range: Range, by: TopBy, metric: TopMetric = "calls", limit = 10) =>
  useRead<Top>(withQuery("/admin/history/top", { ...range.query, by, metric, limit }), range);

// The states of replicas. upstream: of one only.
export const useReplicaHistory = (range: Range, upstream?: string) =>
  useRead<ReplicaHistory>(withQuery("/admin/history/replicas", { ...range.query, upstream }), range);
