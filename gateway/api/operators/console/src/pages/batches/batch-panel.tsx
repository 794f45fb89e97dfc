// One batch: its lines, its times, why it waits or failed, and its files.
import { Ban } from "lucide";
import { count, duration, moment } from "../../lib/format.ts";
import { href, setQuery } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { KeyValues } from "../../ui/key-values.tsx";
import { Stat } from "../../ui/stat.tsx";
import { Empty } from "../../ui/states.tsx";
import { type BatchRow, canCancel, endOf, leftSeconds, linesOf, problemsOf } from "./batch.ts";
import { Files } from "./files.tsx";
import { Progress } from "./progress.tsx";

const close = () => setQuery({ batch: null });
const PROBLEMS_SHOWN = 20;

export interface BatchPanelProps {
  id: string;
  row: BatchRow | undefined;
  // The key may read its files.
  canFetch: boolean;
  canCancelIt: boolean;
  onCancel: () => void;
}

export function BatchPanel({ id, row, canFetch, canCancelIt, onCancel }: BatchPanelProps) {
  if (!row) {
    return (
      <Dialog title="Batch" note={id} isPanel onClose={close} id="batch">
        <Empty title="It is not among these batches">Show older ones, or change the filter.</Empty>
      </Dialog>
    );
  }
  const { batch, tenant, key } = row;
  const lines = linesOf(batch);
  const left = leftSeconds(batch, Date.now() / 1000);
  const ended = endOf(batch);
  const problems = problemsOf(batch);
  const hasFiles = batch.output_file_id || batch.error_file_id;
  return (
    <Dialog
      title={batch.id}
      note={<Badge value={batch.status} />}
      isPanel
      onClose={close}
      id="batch"
      actions={
        canCancelIt &&
        canCancel(batch) && (
          <Button kind="danger" icon={Ban} onClick={onCancel}>
            Cancel the batch
          </Button>
        )
      }
    >
      <div class="stats compact">
        <Stat label="Lines" value={count(lines.total)} />
        <Stat label="Succeeded" value={count(lines.succeeded)} />
        <Stat label="Failed" value={count(lines.failed)} tone={lines.failed ? "bad" : undefined} />
        <Stat label="Not run" value={count(lines.unexecuted)} />
      </div>
      <Progress batch={batch} />
      {batch.wait_reason && <div class="finding tone-warn">{`Waits: ${batch.wait_reason}`}</div>}
      {problems.length > 0 && (
        <section>
          <h3>Why it failed</h3>
          <ul class="problems">
            {problems.slice(0, PROBLEMS_SHOWN).map((problem) => (
              <li key={problem}>{problem}</li>
            ))}
          </ul>
          {problems.length > PROBLEMS_SHOWN && <p class="note">{`and ${count(problems.length - PROBLEMS_SHOWN)} more`}</p>}
        </section>
      )}
      {hasFiles && canFetch && <Files batch={batch} />}
      {hasFiles && !canFetch && <p class="note">Results are fetched with a key of their tenant.</p>}
      <KeyValues
        rows={[
          tenant !== null && ["Tenant", <a href={href("tenants", [tenant])}>{tenant}</a>],
          key !== null && ["Key", key || "–"],
          ["Model", batch.model ?? "–"],
          ["Endpoint", <code>{batch.endpoint}</code>],
          ["Class", "bulk: it yields to interactive calls"],
          ["Tokens so far", count(batch.usage.total_tokens)],
          ["Created", moment(batch.created_at)],
          batch.in_progress_at !== null && ["Running since", moment(batch.in_progress_at)],
          ended !== null && ["Ended", `${moment(ended)}, after ${duration(ended - batch.created_at)}`],
          left !== null && ["Left at this pace", `about ${duration(left)}`],
          ended === null && ["Deadline", moment(batch.expires_at)],
          ["Input file", <code>{batch.input_file_id}</code>],
          ...Object.entries(batch.metadata ?? {}).map(([name, value]): [string, string] => [`metadata ${name}`, value]),
        ]}
      />
      <CopyButton text={batch.id} label="Copy the id" />
    </Dialog>
  );
}
