// A new key, shown this once, with code for its first call, which is reported when it has come.
import { useId } from "preact/hooks";
import { useStatus } from "../../lib/status.ts";
import type { CreatedKey as Created } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Code } from "../../ui/code.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Notes } from "../tenants/saved-notes.tsx";
import { FirstCall } from "./first-call.tsx";
import { firstCallSamples, sampleModel } from "./samples.ts";

export function CreatedKey({ created, onClose }: { created: Created; onClose: () => void }) {
  const id = useId();
  const { snapshot } = useStatus();
  const { key, shown, notes } = created;
  const call = sampleModel(shown, snapshot?.models ?? []);
  return (
    <Dialog
      title={`The key ${shown.id}`}
      note="Copy it now: it is not shown again."
      id="created-key"
      // A click beside the dialog, or Escape, must not lose the key.
      isDirty
      onClose={onClose}
      actions={
        <Button kind="primary" onClick={onClose}>
          I have saved it
        </Button>
      }
    >
      <div class="secret">
        <code id={id}>{key}</code>
        <CopyButton text={key} target={id} label="Copy the key" />
      </div>
      <Notes notes={notes} />
      {call && (
        <>
          <div class="stack">
            <h3>Its first call</h3>
            <p class="note">Python and TypeScript take the key from the environment, as the first line of curl sets it.</p>
            <Code samples={firstCallSamples(call, key)} />
          </div>
          <FirstCall of={shown} onLeave={onClose} />
        </>
      )}
    </Dialog>
  );
}
