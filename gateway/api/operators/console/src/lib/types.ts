// Replies of /admin/status and what other paths share with it, as gateway/telemetry/snapshot.py declares them.
export interface Durations {
  bounds_s: number[];
  // Cumulative, as in Prometheus.
  counts: number[];
}

export interface Lane {
  upstream: string;
  queued_inputs: number;
  queued_tokens: number;
  oldest_s: number;
  in_flight_batches: number;
  window_batches: number;
  attempts: Durations;
  limits: { name: string; amount: number; used_ratio: number }[];
  limited: number;
}

export interface Replica {
  upstream: string;
  name: string;
  state: string;
  reason: string;
  since_s: number | null;
  in_flight_batches: number;
  window_batches: number;
  latency_s: number | null;
  attempts: number;
  failed: number;
  learned_bytes: number | null;
  is_drained: boolean;
}

export interface ModelUpstream {
  name: string;
  role: "member" | "canary" | "mirror";
  standing: string;
  reason: string;
  state: string;
  calls: number;
  weight: number | null;
  priority: number | null;
  share: number | null;
  cosine: number | null;
  min_cosine: number | null;
}

export interface Model {
  name: string;
  upstream: string;
  backend: string;
  state: string;
  operations: string[];
  fingerprint: string | null;
  dimensions: number | null;
  notes: string[];
  cache: string | null;
  memory_bytes: number | null;
  upstreams: ModelUpstream[];
  price_per_million_tokens: number | null;
}

export interface Instance {
  name: string;
  kind: string;
  model_id: string;
  upstream: string;
  status: string;
  pid: number | null;
  restarts: number;
  device: string | null;
  reason: string | null;
}

export interface Checkpoint {
  model: string;
  state: string;
  stored_bytes: number;
  done_bytes: number | null;
  total_bytes: number | null;
  bytes_per_s: number | null;
  upstreams: string[];
  error: string | null;
}

export interface Snapshot {
  version: string;
  at_s: number;
  uptime_s: number;
  worker: number;
  workers: number;
  calls_in_flight: number;
  in_flight_bytes: number;
  store: {
    kind: string;
    away: boolean;
    keys: number;
    tenants: number;
    loss: { since_s: number; until_s: number; reason: string; keys: number; tenants: number } | null;
    reason: string;
  };
  calls: { outcomes: Record<string, number>; durations: Durations; bulk: Durations };
  lanes: Lane[];
  replicas: Replica[];
  models: Model[];
  // Sums since the start. The list of tenants is left out: there may be thousands.
  tenant_totals: { tenants: number; calls: number; inputs: number; tokens: number; refused: number };
  changes: { at_s: number; subject: string; what: string; reason: string }[];
  instances: Instance[];
  registry: Checkpoint[];
  currency: string | null;
  drained_since_s: number | null;
  // Address of a trace, with {trace_id} in it; null without one.
  trace_link?: string | null;
}
