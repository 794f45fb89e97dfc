// One upstream on the page of all: its state, its load, and its replicas, those in trouble first.
import { Pencil, Scale, Trash2 } from "lucide";
import type { Health } from "../../lib/health.ts";
import { count, plural } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Problem } from "../../ui/states.tsx";
import { type ReplicaActions, ReplicaTable } from "./replica-table.tsx";
import type { UpstreamRow } from "./rows.ts";

const REPLICAS_SHOWN = 6;
const MODELS_SHOWN = 3;

export interface UpstreamActions extends ReplicaActions {
  // Undefined for operators who only read.
  verify?: (row: UpstreamRow) => void;
  change?: (row: UpstreamRow) => void;
  remove?: (row: UpstreamRow) => void;
}

export interface UpstreamCardProps extends UpstreamActions {
  row: UpstreamRow;
  health: Health | null;
  span: string;
}

function Facts({ row }: { row: UpstreamRow }) {
  const { lane, models, backend } = row;
  return (
    <span class="brief">
      {backend && <span>{backend}</span>}
      {lane && <span>{`${row.inUse} of ${plural(row.replicas.length, "replica")} in use`}</span>}
      {lane && <span>{`${count(lane.in_flight_batches)} in flight`}</span>}
      {lane && lane.queued_inputs > 0 && <span>{`${plural(lane.queued_inputs, "input")} waiting`}</span>}
      {models.slice(0, MODELS_SHOWN).map(({ name }) => (
        <a key={name} class="clip" href={href("models", [name])} title={name}>
          {name}
        </a>
      ))}
      {models.length > MODELS_SHOWN && <a href={href("upstreams", [row.name])}>{`${count(models.length - MODELS_SHOWN)} more names`}</a>}
      {lane && !models.length && <span>no model uses it</span>}
    </span>
  );
}

export function UpstreamCard({ row, health, span, verify, change, remove, drain, putBack }: UpstreamCardProps) {
  const { name, addition, replicas } = row;
  const isLong = replicas.length > REPLICAS_SHOWN;
  return (
    <Card
      isFlush
      title={
        <span class="heading">
          <a href={href("upstreams", [name])} class="clip" title={name} dir="auto">
            {name}
          </a>
          <Badge value={row.state} />
          {addition && <Badge value="added" tone="info" />}
        </span>
      }
      note={<Facts row={row} />}
      actions={
        <>
          {verify && replicas.length > 0 && (
            <Button isSmall kind="ghost" icon={Scale} ariaLabel={`Verify ${name}`} onClick={() => verify(row)}>
              Verify
            </Button>
          )}
          {addition && change && (
            <Button isSmall kind="ghost" icon={Pencil} label={`Change ${name}`} onClick={() => change(row)} />
          )}
          {addition && remove && (
            <Button isSmall kind="ghost" icon={Trash2} label={`Remove ${name}`} onClick={() => remove(row)} />
          )}
        </>
      }
    >
      <Problem>{addition?.problem}</Problem>
      {row.lane && (
        <ReplicaTable
          upstream={name}
          replicas={replicas.slice(0, REPLICAS_SHOWN)}
          health={health}
          span={span}
          id="replica"
          drain={drain}
          putBack={putBack}
        />
      )}
      {isLong && (
        <p class="card-more">
          <a href={href("upstreams", [name])}>{`All ${plural(replicas.length, "replica")}`}</a>
        </p>
      )}
    </Card>
  );
}
