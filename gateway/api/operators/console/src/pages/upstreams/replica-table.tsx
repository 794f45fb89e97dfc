// Replicas of one upstream: state, load, health over time, and what can be done with each.
import { duration, milliseconds, NONE, percent, plural } from "../../lib/format.ts";
import type { Health } from "../../lib/health.ts";
import type { Replica } from "../../lib/types.ts";
import { useStatus } from "../../lib/status.ts";
import { Badge, toneOf } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Clip } from "../../ui/clip.tsx";
import { HealthStrip } from "../../ui/health-strip.tsx";
import { Meter } from "../../ui/meter.tsx";
import { type Column, Table } from "../../ui/table.tsx";
import { isDrainable, stateOf } from "./rows.ts";

export interface ReplicaActions {
  // Undefined for operators who only read.
  drain?: (replica: Replica) => void;
  putBack?: (replica: Replica) => void;
}

export interface ReplicaTableProps extends ReplicaActions {
  upstream: string;
  replicas: Replica[];
  health: Health | null;
  // Title of the strip's column, such as "Last 24h".
  span: string;
  id?: string;
  file?: string;
}

const failedShare = ({ attempts, failed }: Replica) => (attempts ? failed / attempts : null);

export function ReplicaTable(props: ReplicaTableProps) {
  const { upstream, replicas, health, span, id, file, drain, putBack } = props;
  const { snapshot } = useStatus();
  const sinceOf = ({ since_s }: Replica) => (snapshot && since_s !== null ? duration(snapshot.at_s - since_s) : NONE);
  const columns: Column<Replica>[] = [
    {
      id: "replica",
      title: "Replica",
      value: ({ name }) => name,
      kind: "long",
      show: ({ name, reason }) => (
        <div class="two-lines">
          <Clip class="mono" text={name} />
          {reason && <Clip class="note" text={reason} />}
        </div>
      ),
    },
    { id: "reason", title: "Reason", value: ({ reason }) => reason, kind: "hidden" },
    {
      id: "state",
      title: "State",
      value: stateOf,
      show: (replica) => (
        <div class="two-lines">
          <Badge value={stateOf(replica)} tone={replica.is_drained ? "warn" : toneOf(replica.state)} />
          <span class="note one-line">{`for ${sinceOf(replica)}`}</span>
        </div>
      ),
    },
    {
      id: "load",
      title: "In flight",
      value: ({ in_flight_batches }) => in_flight_batches,
      kind: "number",
      show: ({ name, in_flight_batches, window_batches }) => (
        <div class="two-lines">
          <span>{`${in_flight_batches} of ${window_batches}`}</span>
          <Meter tone="info" share={window_batches ? in_flight_batches / window_batches : 0} label={`In flight to ${name}`} />
        </div>
      ),
    },
    { id: "latency", title: "Latency", value: ({ latency_s }) => latency_s, kind: "number", show: ({ latency_s }) => milliseconds(latency_s) },
    { id: "attempts", title: "Attempts", value: ({ attempts }) => attempts, kind: "number" },
    {
      id: "failed",
      title: "Failed",
      value: failedShare,
      kind: "number",
      show: (replica) => (
        <span class={replica.failed ? "bad-text" : ""} title={plural(replica.failed, "failed attempt")}>
          {percent(failedShare(replica))}
        </span>
      ),
    },
  ];
  if (health) {
    columns.push({
      id: "health",
      title: span,
      isSorted: false,
      show: ({ name }) => (
        <HealthStrip name={name} spans={health.spansOf(upstream, name)} fromS={health.fromS} untilS={health.untilS} />
      ),
    });
  }
  if (drain && putBack && replicas.some((replica) => replica.is_drained || isDrainable(replica))) {
    columns.push({
      id: "actions",
      title: "",
      kind: "actions",
      show: (replica) => <Action replica={replica} drain={drain} putBack={putBack} />,
    });
  }
  return (
    <Table
      label={`Replicas of ${upstream}`}
      id={id}
      columns={columns}
      rows={replicas}
      rowKey={({ name }) => name}
      file={file}
      empty={{ title: "No replicas", children: "Its name resolves to no address, or it has none yet." }}
    />
  );
}

function Action({ replica, drain, putBack }: Required<ReplicaActions> & { replica: Replica }) {
  const place = `${replica.name} of ${replica.upstream}`;
  if (replica.is_drained) {
    return (
      <Button isSmall ariaLabel={`Put back ${place}`} onClick={() => putBack(replica)}>
        Put back
      </Button>
    );
  }
  if (!isDrainable(replica)) return null;
  return (
    <Button isSmall ariaLabel={`Drain ${place}`} onClick={() => drain(replica)}>
      Drain
    </Button>
  );
}
