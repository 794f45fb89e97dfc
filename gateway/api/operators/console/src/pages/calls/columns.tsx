// Columns of the table of calls. Those that it has no room for are in its CSV.
import { milliseconds, moment } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import { STAGES } from "../../lib/stages.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { Clip } from "../../ui/clip.tsx";
import { StageBar } from "../../ui/stage-bar.tsx";
import type { Column } from "../../ui/table.tsx";
import { type Call, isFailed, shortReplica } from "./call.ts";

export const OutcomeBadge = ({ call }: { call: Call }) => (
  <Badge
    value={call.outcome}
    tone={toneOfStatus(call.status)}
    label={`${call.status} ${isFailed(call) ? call.outcome.replaceAll("_", " ") : "ok"}`}
  />
);

// Two lines: a name, and below it what belongs to it.
function Pair({ name, address, more }: { name: string | null; address?: string; more: string | null }) {
  if (!name && !more) return <>–</>;
  return (
    <div class="pair">
      {name && (address ? <a href={address}><Clip text={name} /></a> : <Clip text={name} />)}
      {more && <Clip class="note" text={more} />}
    </div>
  );
}

const hidden = (id: string, value: (call: Call) => string | number | null): Column<Call> => ({
  id,
  title: id.replaceAll("_", " "),
  value,
  kind: "hidden",
});

// addressOf: of a call's panel.
export const columnsOf = (addressOf: (call: Call) => string, hasGateways: boolean): Column<Call>[] => [
  {
    id: "time",
    title: "Time",
    value: (call) => new Date(call.at_s * 1000).toISOString(),
    show: (call) => (
      <a href={addressOf(call)} class="nowrap" aria-label={`Call at ${moment(call.at_s, "second")}, ${call.outcome}`}>
        {moment(call.at_s, "second")}
      </a>
    ),
  },
  {
    id: "outcome",
    title: "Outcome",
    value: (call) => `${call.status} ${call.outcome}`,
    show: (call) => <OutcomeBadge call={call} />,
  },
  {
    id: "tenant",
    title: "Tenant and key",
    value: (call) => call.tenant,
    show: (call) => (
      <Pair name={call.tenant} address={call.tenant ? href("tenants", [call.tenant]) : undefined} more={call.key_id} />
    ),
  },
  {
    id: "model",
    title: "Model",
    value: (call) => call.model,
    show: (call) => <Pair name={call.model} more={call.operation ?? call.route} />,
  },
  { id: "inputs", title: "Inputs", value: (call) => call.inputs, kind: "number" },
  { id: "tokens", title: "Tokens", value: (call) => call.tokens, kind: "number" },
  {
    id: "duration",
    title: "Duration",
    value: (call) => call.duration_s,
    kind: "number",
    show: (call) => (
      <div class="timed">
        {milliseconds(call.duration_s)}
        <StageBar stages={call.stages} durationS={call.duration_s} />
      </div>
    ),
  },
  {
    id: "replica",
    title: hasGateways ? "Replica and gateway" : "Replica",
    value: (call) => call.replicas.at(-1) ?? null,
    show: (call) => {
      const last = call.replicas.at(-1);
      const attempts = call.attempts > 1 ? `${call.attempts} attempts` : null;
      return <Pair name={last ? shortReplica(last) : null} more={hasGateways ? call.gateway : attempts} />;
    },
  },
  ...["request_id", "route", "key_id", "operation", "message", "upstream_status", "upstream_words", "end_user", "gateway"].map((name) =>
    hidden(name, (call) => (call[name as keyof Call] as string | null) ?? null),
  ),
  hidden("attempts", (call) => call.attempts),
  hidden("cost", (call) => call.cost ?? null),
  ...Object.keys(STAGES)
    .filter((name) => name !== "other")
    .map((name) => hidden(`${name}_s`, (call) => call.stages[name] ?? null)),
];
