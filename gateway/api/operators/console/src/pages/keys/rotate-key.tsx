// Replaces a key by one that may do the same. The old one stays valid for a while.
import { useState } from "preact/hooks";
import { named, send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import type { CreatedKey, Key } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Select, TextField } from "../../ui/field.tsx";
import { Problem } from "../../ui/states.tsx";

const OVERLAPS: [string, string][] = [
  ["0s", "not at all: it ends now"],
  ["1h", "1 hour"],
  ["24h", "24 hours"],
  ["168h", "7 days"],
  ["720h", "30 days"],
];

export interface RotateKeyProps {
  of: Key;
  onClose: () => void;
  onRotated: (created: CreatedKey) => void;
}

export function RotateKey({ of, onClose, onRotated }: RotateKeyProps) {
  const [overlap, setOverlap] = useState("24h");
  const [id, setId] = useState("");
  const { busy, problem, run } = useAction(async () => {
    const body = { overlap, ...(id.trim() ? { id: id.trim() } : {}) };
    const { content } = await send<Omit<CreatedKey, "notes">>(named("/admin/keys", of.id, "/rotate"), { body });
    return { ...content, notes: [] };
  });
  const rotate = async () => {
    const rotated = await run();
    if (rotated) onRotated(rotated);
  };
  return (
    <Dialog
      title={`Rotate ${of.id}?`}
      note="A new key with the same scopes, models and limits takes its place."
      onClose={onClose}
      isDirty={id !== ""}
      onSubmit={rotate}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" busy={busy}>
            Rotate the key
          </Button>
        </>
      }
    >
      <Select label="The old key stays valid for" value={overlap} onChange={setOverlap} options={OVERLAPS} />
      <TextField label="Id of the new key" value={id} onInput={setId} hint="Empty: chosen for you." />
      <Problem>{problem?.message}</Problem>
    </Dialog>
  );
}
