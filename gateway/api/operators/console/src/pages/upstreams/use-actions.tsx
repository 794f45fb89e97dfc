// What can be done with upstreams and replicas, and the dialog that is open for it.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { type Additions, type ChangeReport, removeAddition } from "../../lib/additions.ts";
import { useAction } from "../../lib/load.ts";
import type { Replica } from "../../lib/types.ts";
import { useAccess } from "../../shell/access.ts";
import { ChangeList } from "../../ui/change-list.tsx";
import { Confirm } from "../../ui/confirm.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { notify } from "../../ui/toast.tsx";
import { DrainDialog, putBack } from "./drain-dialog.tsx";
import { ReloadPanel } from "./reload-panel.tsx";
import type { UpstreamRow } from "./rows.ts";
import type { UpstreamActions } from "./upstream-card.tsx";
import { UpstreamPanel } from "./upstream-panel.tsx";
import { VerifyPanel } from "./verify-panel.tsx";

type Open =
  | { kind: "drain"; replica: Replica }
  | { kind: "verify"; name: string }
  | { kind: "edit"; row?: UpstreamRow }
  | { kind: "remove"; row: UpstreamRow }
  | { kind: "reload" }
  | { kind: "report"; report: ChangeReport };

export interface PageActions extends UpstreamActions {
  // Undefined for operators who only read, and where this gateway keeps no additions.
  add?: () => void;
  reload?: () => void;
  // Why the last replica was not put back.
  problem: string | undefined;
  dialog: ComponentChildren;
}

// upstreams: names that can be compared.
export function useUpstreamActions(additions: Additions, upstreams: string[]): PageActions {
  const { canChange } = useAccess();
  const [open, setOpen] = useState<Open | null>(null);
  const close = () => setOpen(null);
  const back = useAction(putBack);
  const saved = (report: ChangeReport) => {
    additions.reload();
    // All else is in sight already.
    setOpen(report.needs_restart.length ? { kind: "report", report } : null);
  };
  const canAdd = canChange && additions.isOffered;
  return {
    drain: canChange ? (replica) => setOpen({ kind: "drain", replica }) : undefined,
    putBack: canChange ? (replica) => void back.run(replica) : undefined,
    verify: canChange ? ({ name }) => setOpen({ kind: "verify", name }) : undefined,
    add: canAdd ? () => setOpen({ kind: "edit" }) : undefined,
    change: canAdd ? (row) => setOpen({ kind: "edit", row }) : undefined,
    remove: canAdd ? (row) => setOpen({ kind: "remove", row }) : undefined,
    reload: canChange ? () => setOpen({ kind: "reload" }) : undefined,
    problem: back.problem?.message,
    dialog: open && <Opened open={open} upstreams={upstreams} close={close} saved={saved} />,
  };
}

interface OpenedProps {
  open: Open;
  upstreams: string[];
  close: () => void;
  saved: (report: ChangeReport) => void;
}

function Opened({ open, upstreams, close, saved }: OpenedProps) {
  switch (open.kind) {
    case "drain":
      return <DrainDialog replica={open.replica} onClose={close} />;
    case "verify":
      return <VerifyPanel upstreams={upstreams} upstream={open.name} onClose={close} />;
    case "edit":
      return <UpstreamPanel addition={open.row?.addition} onClose={close} onSaved={saved} />;
    case "reload":
      return <ReloadPanel onClose={close} />;
    case "report":
      return (
        <Dialog title="Saved" onClose={close}>
          <ChangeList report={open.report} />
        </Dialog>
      );
    case "remove":
      return (
        <Confirm
          title={`Remove the upstream ${open.row.name}?`}
          verb="Remove"
          isDanger
          onClose={close}
          action={async () => {
            const report = await removeAddition("upstreams", open.row.name);
            notify(`${open.row.name} is removed.`);
            saved(report);
          }}
        >
          <p>Calls in flight finish first. No model may use it any more.</p>
        </Confirm>
      );
  }
}
