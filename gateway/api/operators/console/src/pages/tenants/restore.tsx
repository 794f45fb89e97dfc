// Gives settings the values that they had before a change, after a question that says what will be set.
import { get, named, RequestError, send } from "../../lib/api.ts";
import { ago } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { fieldsOf, isRestorable, patchOf } from "../../lib/settings.ts";
import type { AuditRecord, StoredTenant } from "../../lib/tenants.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { Failure, Skeleton } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";
import { ChangeList } from "./change-list.tsx";

export interface RestoreProps {
  name: string;
  record: AuditRecord;
  onClose: () => void;
  onRestored: () => void;
}

const isSame = (one: unknown, other: unknown) => JSON.stringify(one ?? null) === JSON.stringify(other ?? null);

export function Restore({ name, record, onClose, onRestored }: RestoreProps) {
  const path = named("/admin/tenants", name);
  const { content: tenant, problem, reload } = useLoad(() => get<StoredTenant>(path), null, record.id);
  const recorded = record.changes.filter(isRestorable);
  const now = tenant ? fieldsOf(tenant.settings) : {};
  // From what is set now, which a later change may have made.
  const changes = recorded.filter(({ field, was }) => !isSame(now[field], was)).map(({ field, was }) => ({ field, was: now[field], is: was }));
  const isLater = recorded.some(({ field, is }) => !isSame(now[field], is));
  const isPartial = recorded.length < record.changes.length;
  const restore = async () => {
    if (!tenant) throw new RequestError(0, "the settings are not read yet");
    if (!changes.length) return;
    try {
      await send(path, { method: "PATCH", body: patchOf(changes, "is"), headers: { "if-match": tenant.etag } });
    } catch (error) {
      if (error instanceof RequestError && error.status === 412) {
        reload();
        throw new RequestError(412, `${name} was changed meanwhile. Look at the values again.`);
      }
      throw error;
    }
    notify(`The settings of ${name} are restored.`);
    onRestored();
  };
  return (
    <Confirm title={`Restore settings of ${name}?`} verb={changes.length || !tenant ? "Restore" : "Close"} action={restore} onClose={onClose}>
      <p class="note">{`From before the change by ${record.actor}, ${ago(Date.parse(record.time) / 1000)}.`}</p>
      <Failure problem={problem} />
      {!tenant && !problem && <Skeleton />}
      {tenant && (changes.length ? <ChangeList changes={changes} /> : <p>They have these values already.</p>)}
      {tenant && isLater && changes.length > 0 && <p class="warned">A later change has set other values; they are replaced too.</p>}
      {isPartial && <p class="note">Fields whose record was cut stay as they are.</p>}
    </Confirm>
  );
}
