// A recent call, as GET /admin/calls lists it, and what is read from it.
export interface Call {
  at_s: number;
  request_id: string;
  route: string;
  status: number;
  outcome: string;
  duration_s: number;
  tenant: string | null;
  key_id: string | null;
  model: string | null;
  operation: string | null;
  inputs: number;
  tokens: number;
  stages: Record<string, number>;
  replicas: string[];
  attempts: number;
  // Of the error, as its reply had it; null for most kinds.
  message?: string | null;
  upstream_status: string | null;
  upstream_words: string | null;
  end_user: string | null;
  gateway: string | null;
  trace_id?: string | null;
  // In the currency of the gateway.
  cost?: number | null;
  // Null if it is not known.
  truncated_inputs?: number | null;
}

export interface CallList {
  kept: number;
  calls: Call[];
  missing: string[];
  problem: string;
}

export const keyOf = (call: Call) => `${call.gateway ?? ""} ${call.request_id} ${call.at_s}`;
// Requests that call no model, such as those of this page, are of interest only if they failed.
export const isOfModel = (call: Call) => call.model !== null || call.outcome !== "ok";
export const isFailed = (call: Call) => call.outcome !== "ok";
// The replica that was asked last, without what all replicas share.
export const shortReplica = (name: string) => name.replace(/^https?:\/\//, "").replace(/\/$/, "");
