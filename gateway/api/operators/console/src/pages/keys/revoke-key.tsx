// Ends a key, after a question.
import { named, send } from "../../lib/api.ts";
import type { Key } from "../../lib/tenants.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { notify } from "../../ui/toast.tsx";

export function RevokeKey({ of, onClose, onRevoked }: { of: Key; onClose: () => void; onRevoked: () => void }) {
  const revoke = async () => {
    await send(named("/admin/keys", of.id), { method: "DELETE" });
    notify(`${of.id} is revoked; every gateway refuses it within a second.`);
    onRevoked();
  };
  return (
    <Confirm title={`Revoke ${of.id}?`} verb="Revoke the key" isDanger action={revoke} onClose={onClose}>
      <p>
        Calls of <bdi>{of.tenant}</bdi> with this key get 401 within a second. It cannot be taken back.
        {of.last_used ? ` It was last used on ${of.last_used} (UTC).` : of.source === "store" ? " It was never used." : ""}
      </p>
    </Confirm>
  );
}
