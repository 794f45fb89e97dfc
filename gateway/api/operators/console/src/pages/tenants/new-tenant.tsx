// Adds a tenant, and leads to its page. One that exists already stays as it is.
import { useState } from "preact/hooks";
import { named, send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { go, href } from "../../lib/route.ts";
import { differences, EMPTY, patchOf } from "../../lib/settings.ts";
import type { StoredTenant } from "../../lib/tenants.ts";
import { notify } from "../../ui/toast.tsx";
import { SavedNotes } from "./saved-notes.tsx";
import { formOf, settingsOf } from "./tenant-form.ts";
import { TenantPanel } from "./tenant-panel.tsx";

const NEW = formOf("", EMPTY);

export function NewTenant({ onClose }: { onClose: () => void }) {
  const [form, setForm] = useState(NEW);
  const [noted, setNoted] = useState<StoredTenant | null>(null);
  const name = form.name.trim();
  const lead = () => {
    onClose();
    go(href("tenants", [name]));
  };
  const { busy, problem, run } = useAction(async () => {
    const body = patchOf(differences(EMPTY, settingsOf(form)));
    return (await send<StoredTenant>(named("/admin/tenants", name), { method: "PUT", body, headers: { "if-none-match": "*" } })).content;
  });
  const save = async () => {
    const tenant = await run();
    if (!tenant) return;
    notify(`${name} is added.`);
    if (tenant.notes.length) setNoted(tenant);
    else lead();
  };
  if (noted) return <SavedNotes title={`${name} is added`} notes={noted.notes} onClose={lead} />;
  return (
    <TenantPanel
      title="New tenant"
      note="Every gateway knows it within a second. Its callers need keys, which you make next."
      verb="Add the tenant"
      isNew
      form={form}
      saved={NEW}
      set={(part) => setForm((before) => ({ ...before, ...part }))}
      busy={busy}
      problem={problem}
      onSave={save}
      onClose={onClose}
    />
  );
}
