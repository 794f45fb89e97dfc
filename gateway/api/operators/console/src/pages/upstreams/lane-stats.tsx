// The queue in front of an upstream, and how long attempts take behind it.
import { count, duration, milliseconds, plural } from "../../lib/format.ts";
import { quantile } from "../../lib/rates.ts";
import { useStatus } from "../../lib/status.ts";
import type { Lane } from "../../lib/types.ts";
import { Stat } from "../../ui/stat.tsx";

export function LaneStats({ lane }: { lane: Lane }) {
  const { rates } = useStatus();
  const recent = rates?.attempts.get(lane.upstream);
  const now = quantile(recent, 0.95);
  return (
    <div class="stats">
      <Stat
        label="Inputs waiting"
        value={count(lane.queued_inputs)}
        note={lane.queued_inputs ? `${plural(lane.queued_tokens, "token")}, the oldest for ${duration(lane.oldest_s)}` : "none"}
      />
      <Stat label="Batches in flight" value={`${count(lane.in_flight_batches)} of ${count(lane.window_batches)}`} note="the window of its replicas" />
      <Stat label="Attempt p50" value={milliseconds(quantile(lane.attempts, 0.5))} note="since the start" />
      <Stat
        label="Attempt p95"
        value={milliseconds(quantile(lane.attempts, 0.95))}
        note={now === null ? "since the start" : `${milliseconds(now)} in the last seconds`}
      />
      <Stat label="Attempts" value={count(lane.attempts.counts.at(-1) ?? 0)} note="since the start" />
    </div>
  );
}
