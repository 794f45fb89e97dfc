// A new key, shown this once, with code for its first call, which is reported when it has come.
import { useId } from "preact/hooks";
import { get, named } from "../../lib/api.ts";
import { useLoad } from "../../lib/load.ts";
import { useStatus } from "../../lib/status.ts";
import type { CreatedKey as Created, Summary } from "../../lib/tenants.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Code } from "../../ui/code.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Notes } from "../tenants/saved-notes.tsx";
import { FirstCall } from "./first-call.tsx";
import { firstCallSamples } from "./samples.ts";

export function CreatedKey({ created, onClose }: { created: Created; onClose: () => void }) {
  const id = useId();
  const { snapshot } = useStatus();
  const { models } = useAccess();
  const { key, shown, notes } = created;
  // A tenant may use fewer models than its key names.
  const { content: tenant, problem } = useLoad(async () => (shown.has_tenant ? get<Summary>(named("/admin/tenants", shown.tenant, "/summary")) : null), null);
  const defaults = new Set(models?.filter((model) => (model.default_for as string[] | undefined)?.length).map((model) => model.id));
  const ordered = (snapshot?.models ?? []).toSorted((one, other) => Number(defaults.has(other.name)) - Number(defaults.has(one.name)));
  const isKnown = !shown.has_tenant || tenant !== null || problem !== null;
  const samples = isKnown ? firstCallSamples(shown, key, ordered, tenant?.settings.models ?? null) : null;
  return (
    <Dialog
      title={`The key ${shown.id}`}
      note="Copy it now: it is not shown again."
      id="created-key"
      // A click beside the dialog, or Escape, must not lose the key.
      isDirty
      question={{ text: "The key is not shown again.", leave: "Close", stay: "Stay" }}
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
      {samples && (
        <>
          <div class="stack">
            <h3>Its first call</h3>
            <p class="note">All take the key from the environment, where the first line for curl puts it.</p>
            <Code samples={samples} />
          </div>
          <FirstCall of={shown} onLeave={onClose} />
        </>
      )}
    </Dialog>
  );
}
