// Removes a tenant with its keys, after a question that says how many.
import { named, send } from "../../lib/api.ts";
import { plural } from "../../lib/format.ts";
import { go } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { notify } from "../../ui/toast.tsx";

export function DeleteTenant({ tenant, onClose }: { tenant: Summary; onClose: () => void }) {
  const { name, key_count, etag, in_file } = tenant;
  const remove = async () => {
    await send(named("/admin/tenants", name), { method: "DELETE", headers: etag ? { "if-match": etag } : {} });
    notify(in_file ? `What was stored of ${name} is removed.` : `${name} and its keys are removed.`);
    go("#/tenants");
  };
  if (in_file) {
    return (
      <Confirm title={`Delete what is stored of ${name}?`} verb="Delete the stored settings" isDanger action={remove} onClose={onClose}>
        <p>
          The tenant of router.yaml stays as it is. {key_count ? "Its keys that were made here end; those of router.yaml stay." : "It has no keys."}
        </p>
      </Confirm>
    );
  }
  return (
    <Confirm title={`Delete ${name}?`} verb="Delete the tenant" isDanger action={remove} onClose={onClose}>
      <p>
        {key_count
          ? `${plural(key_count, "key")} of it ${key_count === 1 ? "ends" : "end"}: every gateway refuses ${key_count === 1 ? "it" : "them"} with 401 within a second.`
          : "It has no keys."}{" "}
        Its usage stays in reports.
      </p>
    </Confirm>
  );
}
