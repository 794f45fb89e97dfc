// A question before an action that is hard to undo. The failure of the action stays in the dialog.
import type { ComponentChildren } from "preact";
import { useAction } from "../lib/load.ts";
import { Button } from "./button.tsx";
import { Dialog } from "./dialog.tsx";
import { Problem } from "./states.tsx";

export interface ConfirmProps {
  title: string;
  // What will happen.
  children?: ComponentChildren;
  // Of the button: a verb, such as "Revoke".
  verb: string;
  isDanger?: boolean;
  action: () => Promise<unknown>;
  onClose: () => void;
}

export function Confirm({ title, children, verb, isDanger, action, onClose }: ConfirmProps) {
  const { busy, problem, run } = useAction(async () => {
    await action();
    return true;
  });
  return (
    <Dialog
      title={title}
      onClose={onClose}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind={isDanger ? "danger" : "primary"} busy={busy} onClick={async () => void ((await run()) && onClose())}>
            {verb}
          </Button>
        </>
      }
    >
      {children}
      <Problem>{problem?.message}</Problem>
    </Dialog>
  );
}
