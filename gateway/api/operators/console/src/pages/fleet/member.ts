// Replies of GET /admin/fleet, as gateway/fleet/members.py declares them.
export interface FleetMember {
  id: string;
  // Host and port.
  name: string;
  host: string;
  pid: number;
  address: string;
  state: "ready" | "not_ready" | "drained" | "stopping" | "silent";
  version: string;
  workers: number;
  // Digest: equal for gateways with the same configuration.
  configuration: string;
  // What most gateways have otherwise: "version", or sections of the configuration.
  differs: string[];
  // Why it is not ready.
  reasons: string[];
  started_s: number;
  uptime_s: number;
  // Of its record.
  age_s: number;
  drained_since_s: number | null;
  drained_replicas: string[];
  load: { calls_in_flight: number; calls_per_s: number | null; queued_inputs: number; queued_tokens: number };
  // It is the gateway that answers.
  is_this: boolean;
}

export interface FleetReport {
  // There is a Redis.
  shared: boolean;
  // Why members are missing.
  problem: string;
  versions: number;
  configurations: number;
  members: FleetMember[];
}
