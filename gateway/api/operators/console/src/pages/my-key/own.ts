// What GET /usage and GET /usage/calls say of the key of this tab and its tenant.
import { get, withQuery } from "../../lib/api.ts";
import { utcDay } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { useParam } from "../../lib/route.ts";

export interface UsageRow {
  // In UTC.
  day: string;
  model: string;
  // Id; empty for usage recorded without one.
  key?: string;
  requests: number;
  inputs: number;
  images: number;
  tokens: number;
  cost: number;
}

export interface UsedLimit {
  limit: string;
  used: number;
  of: number;
  // From 0 to 1.
  share: number;
}

export interface OwnUsage {
  tenant: string;
  key: string;
  expires_s: number | null;
  scopes: string[];
  // Null for all.
  models: string[] | null;
  limits: Record<string, number>;
  model_limits: Record<string, Record<string, number>>;
  data: UsageRow[];
  currency: string | null;
  remaining: Record<string, number>;
  used: UsedLimit[];
}

export interface OwnCall {
  request_id: string;
  at_s: number;
  model: string | null;
  operation: string | null;
  status: number;
  outcome: string;
  // Of the error, as its reply had it; null for most kinds.
  message?: string | null;
  // What to do about the error; null for ok.
  advice: string | null;
  duration_s: number;
  stages: Record<string, number>;
  inputs: number;
  tokens: number;
  cost: number | null;
  truncated_inputs: number | null;
  key_id: string | null;
  trace_id: string | null;
}

export interface OwnCalls {
  kept: number;
  calls: OwnCall[];
  is_complete: boolean;
}

const WEEK_MS = 6 * 86_400_000;
const USAGE_INTERVAL_MS = 30_000;
const CALLS_INTERVAL_MS = 10_000;
const CALLS_SHOWN = 30;
const TIMEOUT_MS = 15_000;
const CALLING = ["embed", "rerank", "classify", "tokenize"];

export const callsModels = ({ scopes }: OwnUsage) => scopes.some((scope) => CALLING.includes(scope));

// The days in the address, else the last week.
export function useDays() {
  const [since, setSince] = useParam("since", utcDay(new Date(Date.now() - WEEK_MS)));
  const [until, setUntil] = useParam("until", utcDay(new Date()));
  return { since, until, setSince, setUntil };
}

// Without days, today's usage.
export const useUsage = (days: { since?: string; until?: string } = {}) => {
  const path = withQuery("/usage", { since: days.since, until: days.until, by: "key" });
  return useLoad(() => get<OwnUsage>(path, TIMEOUT_MS), USAGE_INTERVAL_MS, path);
};

export const useOwnCalls = (isFailed: boolean) => {
  const path = withQuery("/usage/calls", { failed: isFailed || null, limit: CALLS_SHOWN });
  return useLoad(() => get<OwnCalls>(path), CALLS_INTERVAL_MS, path);
};
