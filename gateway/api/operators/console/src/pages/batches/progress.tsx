// Lines of a batch: those that succeeded, failed, and are left.
import { count, percent } from "../../lib/format.ts";
import { type Batch, linesOf } from "./batch.ts";

export function progressText(batch: Batch) {
  const { total, succeeded, failed, unexecuted } = linesOf(batch);
  const facts = [
    `${count(succeeded + failed)} of ${count(total)}`,
    ...(failed > 0 ? [`${count(failed)} failed`] : []),
    ...(unexecuted ? [`${count(unexecuted)} not run`] : []),
  ];
  return facts.join(", ");
}

export function Progress({ batch }: { batch: Batch }) {
  const { total, succeeded, failed } = linesOf(batch);
  if (!total) return <>–</>;
  const done = (succeeded + failed) / total;
  return (
    <div class="batch-progress">
      <div
        class="progress"
        role="progressbar"
        aria-label={`Progress of ${batch.id}`}
        aria-valuenow={Math.round(done * 100)}
        aria-valuemin={0}
        aria-valuemax={100}
        title={percent(done)}
      >
        <span class="bg-good" style={{ width: `${(succeeded / total) * 100}%` }} />
        <span class="bg-bad" style={{ width: `${(failed / total) * 100}%` }} />
      </div>
      <span class="note">{progressText(batch)}</span>
    </div>
  );
}
