// Downloads a model of the Hub to this host.
import { useState } from "preact/hooks";
import { Download } from "lucide";
import { named, RequestError, send } from "../../lib/api.ts";
import { words } from "../../lib/format.ts";
import { useAction } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { TextField } from "../../ui/field.tsx";
import { notify } from "../../ui/toast.tsx";

export function PullPanel({ onClose }: { onClose: () => void }) {
  const [text, setText] = useState("");
  const name = text.trim();
  const { busy, problem, run } = useAction(async () => {
    if (!name) throw new RequestError(0, "Write the model's name on the Hub.");
    await send("/admin/registry", { body: { model_id: name } });
    const { content } = await send(`${named("/admin/registry", name)}/download`, { method: "POST" });
    notify(`${content.model_id}: ${words(content.status)}`);
    return true;
  });
  return (
    <Dialog
      title="Pull a model"
      id="pull"
      note="Its files are stored on this host. The download goes on after this dialog is closed."
      onClose={onClose}
      onSubmit={async () => void ((await run()) && onClose())}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" icon={Download} busy={busy}>
            Pull the model
          </Button>
        </>
      }
    >
      <TextField
        label="Model of the Hub"
        value={text}
        onInput={setText}
        autoFocus
        isRequired
        hint="such as BAAI/bge-m3"
        error={problem?.message}
      />
    </Dialog>
  );
}
