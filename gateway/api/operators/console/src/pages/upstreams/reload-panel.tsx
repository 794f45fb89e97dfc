// Reads router.yaml again, and shows what has changed.
import { useEffect } from "preact/hooks";
import { reloadFile } from "../../lib/additions.ts";
import { useAction } from "../../lib/load.ts";
import { plural } from "../../lib/format.ts";
import { Button } from "../../ui/button.tsx";
import { ChangeList } from "../../ui/change-list.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Problem, Skeleton } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";

export function ReloadPanel({ onClose }: { onClose: () => void }) {
  const { busy, problem, outcome, run } = useAction(async () => {
    const report = await reloadFile();
    const done = report.changes.length;
    notify(done ? `router.yaml was read: ${plural(done, "change")}.` : "router.yaml was read; nothing has changed.");
    return report;
  });
  useEffect(() => void run(), []);
  return (
    <Dialog
      isPanel
      id="reload"
      title="router.yaml"
      note="A replica that the file no longer lists finishes its calls first."
      onClose={onClose}
      actions={
        <>
          <Button busy={busy} onClick={() => void run()}>
            Read it again
          </Button>
          <Button kind="primary" onClick={onClose}>
            Close
          </Button>
        </>
      }
    >
      {busy && <Skeleton rows={3} />}
      {problem && <Problem>{<Lines text={problem.message} />}</Problem>}
      {outcome && !busy && <ChangeList report={outcome} />}
    </Dialog>
  );
}

// Several problems of a file come in one text.
function Lines({ text }: { text: string }) {
  const [start, rest] = text.split(/^(nothing has changed): /).slice(1);
  if (!rest) return <>{text}</>;
  return (
    <>
      {start}:
      <ul>
        {rest.split(/; (?=line \d+: )/).map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </>
  );
}
