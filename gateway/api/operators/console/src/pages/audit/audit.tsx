// Audit: who has changed what, when, from where, and what it was before.
import { RefreshCw } from "lucide";
import { moment } from "../../lib/format.ts";
import { go, href, useRoute } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { ChoiceFilter, Filters, TextFilter } from "../../ui/filters.tsx";
import { Page } from "../../ui/page.tsx";
import { Failure } from "../../ui/states.tsx";
import { type Column, Table } from "../../ui/table.tsx";
import { Diff } from "./diff.tsx";
import { toneOfAction } from "./actions.ts";
import { ACTIONS, type AuditRecord, objectParts, timeOf, valueText } from "./record.ts";
import { RecordPanel } from "./record-panel.tsx";
import { useRecords } from "./use-records.ts";

const KINDS = ["tenant", "key", "upstream", "model", "replica", "instance", "gateway", "batch"];
const TIMES: [string, string][] = [["", "all kept"], ["1h", "the last hour"], ["24h", "the last day"], ["7d", "the last week"], ["30d", "30 days"]];
const SHOWN_FIELDS = 3;

const columnsOf = (addressOf: (record: AuditRecord) => string): Column<AuditRecord>[] => [
  {
    id: "time",
    title: "Time",
    value: (record) => record.time,
    isSorted: false,
    show: (record) => (
      <a href={addressOf(record)} title={moment(timeOf(record), "second")} aria-label={`${record.action} of ${record.object} at ${moment(timeOf(record))}`}>
        {moment(timeOf(record))}
      </a>
    ),
  },
  {
    id: "actor",
    title: "Who",
    value: (record) => record.actor,
    isSorted: false,
    show: (record) => (
      <div class="pair">
        <Clip text={record.actor} />
        <Clip class="note" text={[record.actor_kind, record.address].filter(Boolean).join(" · ")} />
      </div>
    ),
  },
  {
    id: "action",
    title: "Action",
    value: (record) => record.action,
    isSorted: false,
    show: (record) => <Badge value={record.action} tone={toneOfAction(record.action)} />,
  },
  {
    id: "object",
    title: "Object",
    value: (record) => record.object,
    isSorted: false,
    show: (record) => {
      const [kind, name] = objectParts(record.object);
      return (
        <div class="pair">
          <Clip text={name || kind} />
          {name && <span class="note">{kind}</span>}
        </div>
      );
    },
  },
  {
    id: "changes",
    title: "Change",
    value: (record) => record.changes.map(({ field, was, is }) => `${field}: ${valueText(was)} → ${valueText(is)}`).join("; "),
    kind: "long",
    isSorted: false,
    show: (record) => (record.changes.length ? <Diff changes={record.changes} most={SHOWN_FIELDS} /> : "–"),
  },
  { id: "kind", title: "kind of actor", value: (record) => record.actor_kind, kind: "hidden" },
  { id: "address", title: "address", value: (record) => record.address, kind: "hidden" },
  { id: "request_id", title: "request id", value: (record) => record.request_id, kind: "hidden" },
  { id: "gateway", title: "gateway", value: (record) => record.gateway, kind: "hidden" },
];

export function Audit() {
  const { query } = useRoute();
  const { records, next, problem, more, readAll, reload } = useRecords();
  const chosen = query.get("record");
  const addressOf = (record: AuditRecord) => href("audit", [], { ...Object.fromEntries(query), record: record.id });
  return (
    <Page
      title="Audit"
      note="Every change that an operator, a command or the gateway itself has made. Secrets are in no record."
      actions={
        <Button icon={RefreshCw} onClick={reload}>
          Read again
        </Button>
      }
    >
      <Failure problem={problem} id="audit-problem" />
      <Card isFlush id="audit">
        <Filters label="Filters of records">
          <TextFilter name="object" label="Object" placeholder="tenant/acme, or tenant" options={KINDS} />
          <TextFilter name="actor" label="Who" placeholder="as in the record" />
          <ChoiceFilter name="action" label="Action" options={[["", "all"], ...ACTIONS.map((name): [string, string] => [name, name])]} />
          <ChoiceFilter name="since" label="Time" options={TIMES} />
          <TextFilter name="search" label="Search" placeholder="any field" />
        </Filters>
        <Table
          label="Changes"
          columns={columnsOf(addressOf)}
          rows={problem && !records ? [] : records}
          rowKey={(record) => record.id}
          file="audit"
          exported={readAll}
          isSearched={false}
          isWhole
          onOpen={(record) => go(addressOf(record))}
          isSelected={(record) => record.id === chosen}
          empty={{
            title: next ? "None in the newest records" : "No change was recorded",
            children: next ? "The button looks further back." : "Changes of tenants, keys, models, upstreams and drains appear here, newest first.",
          }}
        />
        {next && (
          <div class="more">
            <Button busy={more.busy} onClick={() => void more.run()}>
              Show older
            </Button>
          </div>
        )}
      </Card>
      {chosen && <RecordPanel key={chosen} id={chosen} listed={records} onRestored={reload} />}
    </Page>
  );
}
