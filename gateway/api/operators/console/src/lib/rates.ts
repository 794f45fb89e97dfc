// Rates between two snapshots of /admin/status, which have counters only.
import type { Durations, Snapshot } from "./types.ts";

export interface Rates {
  calls: number;
  tokens: number;
  failures: [kind: string, perS: number][];
  // Of interactive calls.
  durations: Durations;
  // By upstream.
  attempts: Map<string, Durations>;
}

// A counter that is smaller than before belongs to a restarted gateway and counts from zero.
const increase = (earlier: number, later: number) => (later >= earlier ? later - earlier : later);
const total = (histogram?: Durations) => histogram?.counts.at(-1) ?? 0;

// What `later` has in addition to `earlier`.
function histogramBetween(earlier: Durations | undefined, later: Durations): Durations {
  if (!earlier || earlier.bounds_s.length !== later.bounds_s.length || total(earlier) > total(later)) return later;
  return { bounds_s: later.bounds_s, counts: later.counts.map((value, index) => value - (earlier.counts[index] ?? 0)) };
}

// Durations of calls that are not of class bulk.
const interactiveOf = (calls: Snapshot["calls"]) => histogramBetween(calls.bulk, calls.durations);

// A quantile in seconds, by linear interpolation within its bucket; null without values.
export function quantile(durations: Durations | undefined | null, share: number): number | null {
  const rank = share * total(durations ?? undefined);
  if (!rank || !durations) return null;
  let lowerS = 0;
  let below = 0;
  for (const [index, boundS] of durations.bounds_s.entries()) {
    const reached = durations.counts[index] ?? 0;
    if (reached >= rank) return lowerS + ((boundS - lowerS) * (rank - below)) / (reached - below);
    [lowerS, below] = [boundS, reached];
  }
  return lowerS;
}

export function ratesBetween(previous: Snapshot | null, snapshot: Snapshot): Rates | null {
  const seconds = previous ? snapshot.at_s - previous.at_s : 0;
  if (!previous || seconds <= 0) return null;
  const lanes = new Map(previous.lanes.map((lane) => [lane.upstream, lane]));
  const outcomes = Object.entries(snapshot.calls.outcomes).map(([kind, value]): [string, number] => [
    kind,
    increase(previous.calls.outcomes[kind] ?? 0, value) / seconds,
  ]);
  return {
    calls: outcomes.reduce((sum, [, value]) => sum + value, 0),
    tokens: increase(previous.tenant_totals.tokens, snapshot.tenant_totals.tokens) / seconds,
    failures: outcomes.filter(([kind, value]) => kind !== "ok" && value > 0),
    durations: histogramBetween(interactiveOf(previous.calls), interactiveOf(snapshot.calls)),
    attempts: new Map(
      snapshot.lanes.map((lane) => [lane.upstream, histogramBetween(lanes.get(lane.upstream)?.attempts, lane.attempts)]),
    ),
  };
}
