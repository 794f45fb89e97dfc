// Traffic of the last hour in points of ten seconds, which the gateway keeps in memory.
import { useRef } from "preact/hooks";
import { get } from "./api.ts";
import { useLoad } from "./load.ts";
import { useSession } from "./session.ts";

const REFRESH_INTERVAL_MS = 10_000;
const POINTS_MAX = 360;

export interface TrafficPoint {
  // End of the interval.
  at_s: number;
  seconds: number;
  calls: number;
  // Those of `calls` of class bulk, with lines of batches.
  bulk_calls: number;
  failures: Record<string, number>;
  tokens: number;
  // Of interactive calls.
  p50_s: number | null;
  p95_s: number | null;
  p99_s: number | null;
  queued_inputs: number;
  calls_in_flight: number;
}

// Each request asks only for the points that are new. Null until the first reply.
export function useTraffic() {
  const { turn } = useSession();
  const seen = useRef<{ turn: number; points: TrafficPoint[] }>({ turn, points: [] });
  const { content, problem } = useLoad(async () => {
    const before = seen.current.turn === turn ? seen.current.points : [];
    const reply = await get<{ points: TrafficPoint[] }>(`/admin/traffic?after=${before.at(-1)?.at_s ?? 0}`);
    const points = reply.points.length ? [...before, ...reply.points].slice(-POINTS_MAX) : before;
    seen.current = { turn, points };
    return points;
  }, REFRESH_INTERVAL_MS);
  return { points: content, problem };
}
