// Drains a replica: a question, then the progress until nothing is in flight.
import { useState } from "preact/hooks";
import { CircleCheck } from "lucide";
import { send } from "../../lib/api.ts";
import { count, plural } from "../../lib/format.ts";
import { useAction } from "../../lib/load.ts";
import { useStatus } from "../../lib/status.ts";
import type { Replica } from "../../lib/types.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Icon } from "../../ui/icon.tsx";
import { Meter } from "../../ui/meter.tsx";
import { Skeleton, Problem } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";

const place = ({ upstream, name }: Replica) => ({ body: { upstream, replica: name } });

export async function putBack(replica: Replica) {
  await send("/admin/replicas/undrain", place(replica));
  notify(`${replica.name} gets work again, once it responds.`);
}

export function DrainDialog({ replica, onClose }: { replica: Replica; onClose: () => void }) {
  const { snapshot } = useStatus();
  const { upstream, name } = replica;
  // Batches in flight when it was drained.
  const [most, setMost] = useState(0);
  const now = snapshot?.replicas.find((one) => one.upstream === upstream && one.name === name);
  const drain = useAction(async () => {
    setMost(now?.in_flight_batches ?? 0);
    await send("/admin/replicas/drain", place(replica));
    return true;
  });
  const undo = useAction(async () => {
    await putBack(replica);
    onClose();
  });
  const left = now?.in_flight_batches ?? 0;
  if (!drain.outcome) {
    return (
      <Dialog
        title="Drain this replica?"
        onClose={onClose}
        id="drain"
        actions={
          <>
            <Button onClick={onClose}>Cancel</Button>
            <Button kind="primary" busy={drain.busy} onClick={() => void drain.run()}>
              Drain
            </Button>
          </>
        }
      >
        <p>
          <code>{name}</code> of {upstream} gets no new work, until you put it back. Its {plural(left, "batch", "batches")} in flight
          will finish.
        </p>
        <Problem>{drain.problem?.message}</Problem>
      </Dialog>
    );
  }
  return (
    <Dialog
      title={now?.is_drained && !left ? "Drained" : "Draining"}
      note={<code>{name}</code>}
      onClose={onClose}
      id="drain"
      actions={
        <>
          <Button busy={undo.busy} onClick={() => void undo.run()}>
            Put back
          </Button>
          <Button kind="primary" onClick={onClose}>
            Close
          </Button>
        </>
      }
    >
      {now?.is_drained ? <Progress left={left} most={most} /> : <Skeleton rows={1} />}
      <Problem>{undo.problem?.message}</Problem>
    </Dialog>
  );
}

function Progress({ left, most }: { left: number; most: number }) {
  const all = Math.max(most, left, 1);
  return (
    <div class="stack" role="status">
      {left ? (
        <p>{`It gets no new work. ${plural(left, "batch", "batches")} in flight.`}</p>
      ) : (
        <p class="row good-text">
          <Icon of={CircleCheck} />
          {`${count(0)} in flight: its server can be stopped.`}
        </p>
      )}
      <Meter tone="good" share={(all - left) / all} label="Finished" />
    </div>
  );
}
