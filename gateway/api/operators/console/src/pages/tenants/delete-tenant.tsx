// Removes a tenant with its keys, after a question that says how many.
import { named, send } from "../../lib/api.ts";
import { plural } from "../../lib/format.ts";
import { go } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { notify } from "../../ui/toast.tsx";

export function DeleteTenant({ tenant, onClose }: { tenant: Summary; onClose: () => void }) {
  const { name, key_count, etag } = tenant;
  const remove = async () => {
    await send(named("/admin/tenants", name), { method: "DELETE", headers: etag ? { "if-match": etag } : {} });
    notify(`${name} and its keys are removed.`);
    go("#/tenants");
  };
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
