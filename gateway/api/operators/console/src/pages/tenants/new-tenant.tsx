// Adds a tenant, and leads to its page. One that exists already stays as it is.
import { useState } from "preact/hooks";
import { get, named, RequestError, send, withQuery } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { go, href } from "../../lib/route.ts";
import { differences, EMPTY, patchOf } from "../../lib/settings.ts";
import type { StoredTenant, TenantPage } from "../../lib/tenants.ts";
import { notify } from "../../ui/toast.tsx";
import { SavedNotes } from "./saved-notes.tsx";
import { formOf, settingsOf } from "./tenant-form.ts";
import { TenantPanel } from "./tenant-panel.tsx";

// A stored tenant of a name in router.yaml would never apply.
async function refuseNameOfFile(name: string) {
  const { data } = await get<TenantPage>(withQuery("/admin/tenants", { search: name, source: "file", sort: "name", limit: 1000 }));
  if (!data.some((tenant) => tenant.name === name)) return;
  throw new RequestError(0, `router.yaml defines the tenant ${name}: change it there, or choose another name.`, "name");
}

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
    await refuseNameOfFile(name);
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
