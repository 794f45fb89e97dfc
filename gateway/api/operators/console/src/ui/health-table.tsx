// The states of a replica as a table in a panel, the newest first.
import { duration, moment } from "../lib/format.ts";
import type { ReplicaSpan } from "../lib/history.ts";
import { Badge } from "./badge.tsx";
import { Button } from "./button.tsx";
import { Clip } from "./clip.tsx";
import { Dialog } from "./dialog.tsx";
import { Table } from "./table.tsx";

export interface HealthTableProps {
  name: string;
  spans: ReplicaSpan[];
  note: string;
  onClose: () => void;
}

const lengthOf = ({ from_s, until_s }: ReplicaSpan) => (until_s ?? Date.now() / 1000) - from_s;

export const HealthTable = ({ name, spans, note, onClose }: HealthTableProps) => (
  <Dialog isPanel title="Health over time" note={<Clip text={name} />} onClose={onClose} actions={<Button onClick={onClose}>Close</Button>}>
    <p class="note">{note}</p>
    <Table
      label={`Health of ${name}`}
      id="health"
      rows={spans.toReversed()}
      rowKey={({ from_s }) => String(from_s)}
      file="health"
      columns={[
        { id: "state", title: "State", value: ({ state }) => state, show: ({ state }) => <Badge value={state} /> },
        { id: "from", title: "From", value: ({ from_s }) => from_s, show: ({ from_s }) => moment(from_s), kind: "number" },
        { id: "for", title: "For", value: lengthOf, show: (span) => duration(lengthOf(span)), kind: "number" },
        { id: "reason", title: "Reason", value: ({ reason }) => reason, kind: "long", show: ({ reason }) => reason || "–" },
      ]}
    />
  </Dialog>
);
