// The queues in front of the upstreams, and the limits of the upstreams' accounts.
import { count, milliseconds, NONE } from "../../lib/format.ts";
import { limitWords } from "../../lib/limits.ts";
import { quantile, type Rates } from "../../lib/rates.ts";
import { href } from "../../lib/route.ts";
import type { Lane, Snapshot } from "../../lib/types.ts";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Meter } from "../../ui/meter.tsx";
import { type Column, Table } from "../../ui/table.tsx";

function Limits({ lane, currency }: { lane: Lane; currency: string | null }) {
  if (!lane.limits.length) return <>{NONE}</>;
  return (
    <span class="lane-limits">
      {lane.limits.map(({ name, amount, used_ratio }) => (
        <span key={name}>
          <span class="note">{limitWords(name, amount, currency)}</span>
          <Meter share={used_ratio} label={`Used of ${limitWords(name, amount, currency)}`} />
        </span>
      ))}
      {lane.limited > 0 && <span class="note">{`no room for ${count(lane.limited)} requests since the start`}</span>}
    </span>
  );
}

const most = ({ limits }: Lane) => (limits.length ? Math.max(...limits.map(({ used_ratio }) => used_ratio)) : null);

function columnsOf(rates: Rates | null, currency: string | null): Column<Lane>[] {
  // Of the last seconds, else since the start.
  const p50 = ({ upstream, attempts }: Lane) => quantile(rates?.attempts.get(upstream), 0.5) ?? quantile(attempts, 0.5);
  return [
    {
      id: "upstream",
      title: "Upstream",
      value: ({ upstream }) => upstream,
      show: ({ upstream }) => (
        <a href={href("upstreams", [upstream])}>
          <Clip text={upstream} />
        </a>
      ),
    },
    { id: "waiting", title: "Waiting inputs", value: (lane) => lane.queued_inputs, kind: "number" },
    { id: "tokens", title: "Waiting tokens", value: (lane) => lane.queued_tokens, kind: "number" },
    {
      id: "oldest",
      title: "Oldest",
      value: (lane) => (lane.queued_inputs ? lane.oldest_s : null),
      show: (lane) => (lane.queued_inputs ? milliseconds(lane.oldest_s) : NONE),
      kind: "number",
    },
    {
      id: "window",
      title: "In flight / window",
      value: (lane) => lane.in_flight_batches,
      show: (lane) => (
        <span class="lane-window">
          {`${count(lane.in_flight_batches)} / ${count(lane.window_batches)}`}
          <Meter
            share={lane.window_batches ? Math.min(0.79, lane.in_flight_batches / lane.window_batches) : 0}
            label="Used of the window"
          />
        </span>
      ),
      kind: "number",
    },
    { id: "attempt", title: "Attempt p50", value: p50, show: (lane) => milliseconds(p50(lane)), kind: "number" },
    {
      id: "limits",
      title: "Limits of the account",
      value: most,
      show: (lane) => <Limits lane={lane} currency={currency} />,
    },
  ];
}

export function Lanes({ snapshot, rates }: { snapshot: Snapshot; rates: Rates | null }) {
  return (
    <Card title="Lanes" note="The queue in front of each upstream" isFlush id="lanes">
      <Table
        id="lanes"
        label="Lanes"
        rows={snapshot.lanes}
        rowKey={({ upstream }) => upstream}
        columns={columnsOf(rates, snapshot.currency)}
        empty={{
          title: "No upstream is configured",
          children: "Add one on the page Upstreams, or in router.yaml.",
          action: <a href={href("upstreams")}>Upstreams</a>,
        }}
      />
    </Card>
  );
}
