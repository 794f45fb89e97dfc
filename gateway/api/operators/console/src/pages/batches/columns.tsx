// Columns of the table of batches.
import { ago, duration, moment } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Clip } from "../../ui/clip.tsx";
import type { Column } from "../../ui/table.tsx";
import { type BatchRow, canCancel, endOf, leftSeconds, linesOf, reasonOf } from "./batch.ts";
import { Progress } from "./progress.tsx";

export interface ColumnOptions {
  isOwn: boolean;
  addressOf: (id: string) => string;
  // Undefined for keys that cannot cancel.
  onCancel?: (row: BatchRow) => void;
}

function Deadline({ row: { batch } }: { row: BatchRow }) {
  const nowS = Date.now() / 1000;
  const ended = endOf(batch);
  if (ended !== null) return <span class="nowrap">{`took ${duration(ended - batch.created_at)}`}</span>;
  const left = leftSeconds(batch, nowS);
  return (
    <div class="pair nowrap">
      <span>{left === null ? "not known yet" : `about ${duration(left)} left`}</span>
      <span class="note">{`at most ${duration(Math.max(0, batch.expires_at - nowS))}`}</span>
    </div>
  );
}

const owner: Column<BatchRow> = {
  id: "tenant",
  title: "Tenant and key",
  value: ({ tenant }) => tenant,
  show: ({ tenant, key }) => (
    <div class="pair">
      <a href={href("tenants", [tenant ?? ""])}>
        <Clip text={tenant ?? ""} />
      </a>
      {key && <Clip class="note" text={key} />}
    </div>
  ),
};

export const columnsOf = ({ isOwn, addressOf, onCancel }: ColumnOptions): Column<BatchRow>[] => [
  {
    id: "id",
    title: "Batch",
    value: ({ batch }) => batch.id,
    show: ({ batch }) => (
      <div class="pair batch-id">
        <a class="mono" href={addressOf(batch.id)}>
          <Clip text={batch.id} />
        </a>
        <span class="note" title={moment(batch.created_at)}>
          {ago(batch.created_at)}
        </span>
      </div>
    ),
  },
  { id: "status", title: "State", value: ({ batch }) => batch.status, show: ({ batch }) => <Badge value={batch.status} /> },
  {
    id: "done",
    title: "Lines",
    value: ({ batch }) => linesOf(batch).succeeded + linesOf(batch).failed,
    show: ({ batch }) => <Progress batch={batch} />,
  },
  ...(isOwn ? [] : [owner]),
  {
    id: "model",
    title: "Model",
    value: ({ batch }) => batch.model,
    show: ({ batch }) => (
      <div class="pair batch-model">
        <Clip text={batch.model ?? "–"} />
        <Clip class="note" text={batch.endpoint.replace(/^\/(v\d\/)?/, "")} />
      </div>
    ),
  },
  { id: "end", title: "Time", value: ({ batch }) => endOf(batch), show: (row) => <Deadline row={row} /> },
  { id: "reason", title: "Reason", value: ({ batch }) => reasonOf(batch) || null, kind: "long" },
  { id: "created", title: "created", value: ({ batch }) => new Date(batch.created_at * 1000).toISOString(), kind: "hidden" },
  { id: "key", title: "key", value: ({ key }) => key, kind: "hidden" },
  { id: "tokens", title: "tokens", value: ({ batch }) => batch.usage.total_tokens, kind: "hidden" },
  {
    id: "actions",
    title: "",
    kind: "actions",
    show: (row) =>
      onCancel &&
      canCancel(row.batch) && (
        <Button isSmall onClick={() => onCancel(row)}>
          Cancel<span class="unseen"> {row.batch.id}</span>
        </Button>
      ),
  },
];
