// The tenant's recent calls, first of all the failed ones, each with what to do.
import { moment, milliseconds, words } from "../../lib/format.ts";
import { href, setQuery, useParam, useRoute } from "../../lib/route.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { StageBar } from "../../ui/stage-bar.tsx";
import { Failure } from "../../ui/states.tsx";
import { type Column, Table } from "../../ui/table.tsx";
import { Tabs } from "../../ui/tabs.tsx";
import { OwnCallPanel } from "./call-panel.tsx";
import { type OwnCall, useOwnCalls } from "./own.ts";

const VIEWS = [
  { name: "failed", title: "Failed calls" },
  { name: "all", title: "All calls" },
];

const reason: Column<OwnCall> = {
  id: "advice",
  title: "Why, and what to do",
  value: (call) => [call.message, call.advice].filter(Boolean).join(" – "),
  show: (call) => (
    <>
      {call.message && <div dir="auto">{call.message}</div>}
      <div class={call.message ? "note" : ""}>{call.advice}</div>
    </>
  ),
  kind: "long",
};

const columnsOf = (addressOf: (call: OwnCall) => string, isFailed: boolean): Column<OwnCall>[] => [
  {
    id: "time",
    title: "Time",
    value: (call) => new Date(call.at_s * 1000).toISOString(),
    show: (call) => (
      <a href={addressOf(call)} aria-label={`Call at ${moment(call.at_s, "second")}, ${call.outcome}`}>
        {moment(call.at_s, "second")}
      </a>
    ),
  },
  {
    id: "outcome",
    title: "Outcome",
    value: (call) => `${call.status} ${call.outcome}`,
    show: (call) => <Badge value={call.outcome} tone={toneOfStatus(call.status)} label={`${call.status} ${words(call.outcome)}`} />,
  },
  {
    id: "model",
    title: "Model",
    value: (call) => call.model,
    show: (call) => (
      <div class="pair">
        <Clip text={call.model ?? "–"} />
        {call.operation && <span class="note">{call.operation}</span>}
      </div>
    ),
  },
  ...(isFailed
    ? [reason]
    : [{ id: "tokens", title: "Tokens", value: (call: OwnCall) => call.tokens, kind: "number" as const }]),
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
  { id: "key", title: "Key", value: (call) => call.key_id },
  { id: "request_id", title: "request id", value: (call) => call.request_id, kind: "hidden" },
];

export function CallsCard() {
  const { query } = useRoute();
  const [view, setView] = useParam("calls", "failed");
  const isFailed = view !== "all";
  const { content, problem } = useOwnCalls(isFailed);
  const chosen = query.get("call");
  const calls = content?.calls ?? null;
  const addressOf = (call: OwnCall) => href("usage", [], { ...Object.fromEntries(query), call: call.request_id });
  const call = calls?.find(({ request_id }) => request_id === chosen);
  return (
    <Card
      title="Recent calls"
      note="The newest that this gateway keeps, of all keys of the tenant. Calls without a valid key are not among them."
      id="own-calls"
      isFlush
    >
      <div class="inset">
        <Tabs label="Calls" tabs={VIEWS} chosen={isFailed ? "failed" : "all"} onChoose={setView} />
      </div>
      <Failure problem={problem} />
      <Table
        label="Recent calls"
        id="calls"
        columns={columnsOf(addressOf, isFailed)}
        rows={problem && !calls ? [] : calls}
        rowKey={({ request_id, at_s }) => `${request_id} ${at_s}`}
        file="own-calls"
        onOpen={({ request_id }) => setQuery({ call: request_id })}
        empty={
          isFailed
            ? { title: "No call has failed", children: "Of the calls that the gateway keeps. A failed one appears here with what to do." }
            : { title: "No calls yet", children: "The code above makes the first one." }
        }
      />
      {call && <OwnCallPanel key={call.request_id} call={call} onClose={() => setQuery({ call: null })} />}
    </Card>
  );
}
