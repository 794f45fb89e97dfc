// Upstreams as the pages show them: what the status reports about each, put together.
import type { Addition, Additions } from "../../lib/additions.ts";
import { count } from "../../lib/format.ts";
import type { Lane, Model, Replica, Snapshot } from "../../lib/types.ts";

export interface UpstreamRow {
  name: string;
  // ready, degraded (a replica that should work does not), unavailable, or not_applied.
  state: string;
  // Null where no model uses it.
  backend: string | null;
  lane: Lane | null;
  replicas: Replica[];
  // Replicas that get work.
  inUse: number;
  models: Model[];
  addition: Addition | undefined;
}

// Engines of this gateway and addresses of DNS are not drained.
export const isDrainable = ({ name }: Replica) => name.includes("://") && !name.includes("#");

export const isInUse = ({ state, is_drained }: Replica) => !is_drained && (state === "up" || state === "probation");

export function stateOf(replica: Replica) {
  if (!replica.is_drained) return replica.state;
  if (replica.in_flight_batches) return `draining, ${count(replica.in_flight_batches)} in flight`;
  return replica.state === "drained" ? "drained" : `drained, ${replica.state}`;
}

// Troubles first, then as the gateway lists them.
const SEVERITY = ["down", "refused", "gone", "joining", "probation", "drained"];
export function severityOf({ state, is_drained }: Replica) {
  const at = SEVERITY.indexOf(is_drained ? "drained" : state);
  return at < 0 ? SEVERITY.length : at;
}

function stateOfAll(replicas: Replica[], inUse: number) {
  if (!inUse) return "unavailable";
  return replicas.every((replica) => replica.is_drained || replica.state === "up") ? "ready" : "degraded";
}

export function upstreamRows(snapshot: Snapshot, additions: Additions): UpstreamRow[] {
  const replicas = grouped(snapshot.replicas);
  const backends = new Map(snapshot.models.map(({ upstream, backend }) => [upstream, backend]));
  const rows = snapshot.lanes.map((lane): UpstreamRow => {
    const name = lane.upstream;
    const own = replicas.get(name) ?? [];
    const addition = additions.find(name);
    const inUse = own.filter(isInUse).length;
    return {
      name,
      state: stateOfAll(own, inUse),
      backend: backends.get(name) ?? (addition ? String(addition.settings.backend) : null),
      lane,
      replicas: own.toSorted((one, other) => severityOf(one) - severityOf(other)),
      inUse,
      models: snapshot.models.filter(
        (model) => model.upstream === name || model.upstreams.some((upstream) => upstream.name === name),
      ),
      addition,
    };
  });
  const known = new Set(rows.map(({ name }) => name));
  const unused = (additions.content ?? []).filter(({ name }) => !known.has(name));
  return [
    ...rows,
    ...unused.map((addition): UpstreamRow => {
      const backend = String(addition.settings.backend);
      const name = addition.name;
      return { name, state: "not_applied", backend, lane: null, replicas: [], inUse: 0, models: [], addition };
    }),
  ];
}

function grouped(replicas: Replica[]) {
  const groups = new Map<string, Replica[]>();
  for (const replica of replicas) {
    const group = groups.get(replica.upstream);
    if (group) group.push(replica);
    else groups.set(replica.upstream, [replica]);
  }
  return groups;
}
