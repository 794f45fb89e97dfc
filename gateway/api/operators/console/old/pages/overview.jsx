// Overview: traffic of the last hour, and the latest changes.
import { useRef } from "preact/hooks";
import { send, STATUS_TIMEOUT_MS } from "../api.js";
import { Chart } from "../chart.jsx";
import { clock, count, milliseconds, rate } from "../format.js";
import { usePolling } from "../hooks.js";
import { Note, Table } from "../parts.jsx";
import { quantile } from "../rates.js";

const POINTS_MAX = 360;
const TROUBLES_MAX = 6;

// Points of the last hour; each request asks for those that are new.
function useTraffic(turn) {
  const points = useRef([]);
  const { content, problem } = usePolling(
    async () => {
      const after = points.current.at(-1)?.at_s ?? 0;
      const { content: reply } = await send(`/admin/traffic?after=${after}`, { timeoutMs: STATUS_TIMEOUT_MS });
      points.current = [...points.current, ...reply.points].slice(-POINTS_MAX);
      return points.current;
    },
    10000,
    turn,
  );
  return { points: content ?? points.current, problem };
}

function Charts({ turn }) {
  const { points, problem } = useTraffic(turn);
  if (problem && !points.length) return null;
  if (points.length < 2) return <Note>The charts begin half a minute after the gateway&apos;s start.</Note>;
  const times = points.map((point) => point.at_s);
  const per = (value) => points.map((point) => value(point) / point.seconds);
  const of = (field) => points.map((point) => point[field]);
  const failed = (point) => Object.values(point.failures).reduce((sum, value) => sum + value, 0);
  return (
    <div class="charts" id="charts">
      <Chart
        title="Calls per second"
        times={times}
        format={rate}
        series={[
          { name: "interactive", values: per((point) => point.calls - point.bulk_calls), color: "accent" },
          { name: "bulk and lines of batches", values: per((point) => point.bulk_calls), color: "second", dash: [8, 4] },
          { name: "failed", values: per(failed), color: "bad", dash: [3, 3] },
        ]}
      />
      <Chart
        title="Latency of interactive calls"
        times={times}
        format={milliseconds}
        series={[
          { name: "p50", values: of("p50_s"), color: "accent" },
          { name: "p95", values: of("p95_s"), color: "second", dash: [8, 4] },
          { name: "p99", values: of("p99_s"), color: "bad", dash: [3, 3] },
        ]}
      />
      <Chart
        title="Tokens per second"
        times={times}
        format={rate}
        series={[{ name: "tokens", values: per((point) => point.tokens), color: "accent" }]}
      />
      <Chart
        title="Waiting and in flight"
        times={times}
        format={rate}
        series={[
          { name: "inputs waiting", values: of("queued_inputs"), color: "second", dash: [8, 4] },
          { name: "calls in flight", values: of("calls_in_flight"), color: "accent" },
        ]}
      />
    </div>
  );
}

function Figures({ snapshot, rates }) {
  const figures = [
    ["calls/s", rate(rates?.calls ?? null)],
    ["tokens/s", rate(rates?.tokens ?? null)],
    ["interactive p50", milliseconds(rates && quantile(rates.durations, 0.5))],
    ["interactive p95", milliseconds(rates && quantile(rates.durations, 0.95))],
    ["failures/s", rate(rates && rates.failures.reduce((sum, [, value]) => sum + value, 0))],
    ["calls in flight", count(snapshot.calls_in_flight)],
  ];
  return (
    <dl id="figures">
      {figures.map(([name, value]) => (
        <div>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

// What an operator should look at first.
function Troubles({ snapshot, rates }) {
  const troubles = [
    ...(snapshot.store.away ? ["The quota store is unavailable."] : []),
    ...snapshot.models
      .filter((model) => model.state !== "ready")
      .map((model) =>
        model.state === "canary_only"
          ? `Calls of ${model.name} fail: upstream ${model.upstream} has no replica in use, and the canary takes its share only.`
          : `Model ${model.name} is ${model.state}.`,
      ),
    ...snapshot.models.flatMap((model) =>
      (model.upstreams ?? [])
        .filter((upstream) => ["refused", "withdrawn"].includes(upstream.standing))
        .map((upstream) => `Upstream ${upstream.name} of ${model.name} is ${upstream.standing}: ${upstream.reason}`),
    ),
    ...snapshot.replicas
      .filter((replica) => replica.state === "down" && !replica.is_drained)
      .map((replica) => `Replica ${replica.name} of ${replica.upstream} is down: ${replica.reason}`),
    ...snapshot.replicas
      .filter((replica) => replica.is_drained)
      .map((replica) => `Replica ${replica.name} of ${replica.upstream} is drained (${replica.state}).`),
  ];
  const kinds = (rates?.failures ?? []).map(([kind, value]) => `${kind} ${rate(value)}/s`);
  if (kinds.length) troubles.unshift(`Failures: ${kinds.join(" · ")}`);
  if (!troubles.length) return null;
  return (
    <ul class="problem troubles" id="troubles">
      {troubles.slice(0, TROUBLES_MAX).map((trouble) => (
        <li>{trouble}</li>
      ))}
      {troubles.length > TROUBLES_MAX && <li>And {count(troubles.length - TROUBLES_MAX)} more: see Models and Upstreams.</li>}
    </ul>
  );
}

export function Overview({ snapshot, rates, turn }) {
  if (!snapshot) return null;
  return (
    <>
      <Troubles snapshot={snapshot} rates={rates} />
      <Figures snapshot={snapshot} rates={rates} />
      <Charts turn={turn} />
      <h3>Lanes</h3>
      <Table
        id="lanes"
        label="Lanes"
        columns={[
          ["upstream", "text"],
          ["waiting inputs", "number"],
          ["tokens", "number"],
          ["oldest", "number"],
          ["in flight", "number"],
          ["window", "number"],
          ["attempt p50", "number"],
        ]}
        rows={snapshot.lanes.map((lane) => [
          lane.upstream,
          count(lane.queued_inputs),
          count(lane.queued_tokens),
          lane.queued_inputs ? milliseconds(lane.oldest_s) : "–",
          count(lane.in_flight_batches),
          count(lane.window_batches),
          milliseconds(rates && quantile(rates.attempts.get(lane.upstream), 0.5)),
        ])}
      />
      <h3>Recent changes</h3>
      <Table
        id="changes"
        label="Recent changes"
        empty="None."
        columns={[["at"], ["of", "text"], ["now"], ["why", "text"]]}
        rows={snapshot.changes
          .slice(0, 12)
          .map((change) => [clock(change.at_s), change.subject, change.what, change.reason])}
      />
    </>
  );
}
