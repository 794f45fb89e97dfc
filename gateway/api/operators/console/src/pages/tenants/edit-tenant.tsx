// Changes a stored tenant. If another operator has changed it meanwhile, shows that, and starts from it.
import { useState } from "preact/hooks";
import { get, named, RequestError, send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { differences, merged, patchOf } from "../../lib/settings.ts";
import type { Settings, StoredTenant } from "../../lib/tenants.ts";
import { notify } from "../../ui/toast.tsx";
import { Conflict } from "./conflict.tsx";
import { SavedNotes } from "./saved-notes.tsx";
import { formOf, settingsOf } from "./tenant-form.ts";
import { TenantPanel } from "./tenant-panel.tsx";

export interface EditTenantProps {
  name: string;
  etag: string;
  settings: Settings;
  onClose: () => void;
  onSaved: () => void;
}

export function EditTenant({ name, etag, settings, onClose, onSaved }: EditTenantProps) {
  // What is stored, as this panel knows it: the page behind it is read again meanwhile.
  const [base, setBase] = useState({ etag, settings });
  const [form, setForm] = useState(() => formOf(name, settings));
  const [theirs, setTheirs] = useState<StoredTenant | null>(null);
  const [notes, setNotes] = useState<string[]>([]);
  const { busy, problem, run, reset } = useAction(async () => {
    const body = patchOf(differences(base.settings, settingsOf(form)));
    try {
      return (await send<StoredTenant>(named("/admin/tenants", name), { method: "PATCH", body, headers: { "if-match": base.etag } })).content;
    } catch (error) {
      if (!(error instanceof RequestError) || error.status !== 412) throw error;
      setTheirs(await get<StoredTenant>(named("/admin/tenants", name)));
      return null;
    }
  });
  const save = async () => {
    const saved = await run();
    if (!saved) return;
    notify(`${name} is saved.`);
    onSaved();
    if (saved.notes.length) setNotes(saved.notes);
    else onClose();
  };
  const startFrom = (isMineKept: boolean) => {
    if (!theirs) return;
    const mine = patchOf(differences(base.settings, settingsOf(form)));
    setForm(formOf(name, isMineKept ? merged(theirs.settings, mine) : theirs.settings));
    setBase({ etag: theirs.etag, settings: theirs.settings });
    setTheirs(null);
    reset();
  };
  if (notes.length) return <SavedNotes title={`${name} is saved`} notes={notes} onClose={onClose} />;
  return (
    <TenantPanel
      title={`Edit ${name}`}
      note="Every gateway applies the settings within a second."
      verb="Save the tenant"
      form={form}
      saved={formOf(name, base.settings)}
      set={(part) => setForm((before) => ({ ...before, ...part }))}
      busy={busy}
      problem={problem}
      onSave={save}
      onClose={onClose}
    >
      {theirs && <Conflict name={name} changes={differences(base.settings, theirs.settings)} onLoad={startFrom} />}
    </TenantPanel>
  );
}
