// Sets the fields of a tenant that a record has changed back to what they were, unless it was changed since it was
// read here. Fields that were changed again after the record are marked.
import { RequestError, named, send } from "../../lib/api.ts";
import { useLoad } from "../../lib/load.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { Problem, Skeleton } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";
import { type AuditRecord, fieldText, objectParts, valueText } from "./record.ts";
import { presentValue } from "./settings.ts";

interface Stored {
  settings: Record<string, unknown>;
  etag: string;
  in_file: boolean;
}

// Null if there is no such tenant now.
async function readTenant(name: string): Promise<{ stored: Stored | null }> {
  try {
    const { content, headers } = await send<Stored>(named("/admin/tenants", name));
    return { stored: { ...content, etag: headers.get("etag") ?? content.etag } };
  } catch (error) {
    if (error instanceof RequestError && error.status === 404) return { stored: null };
    throw error;
  }
}

export interface RestoreProps {
  record: AuditRecord;
  onClose: () => void;
  onDone: () => void;
}

export function Restore({ record, onClose, onDone }: RestoreProps) {
  const [, name] = objectParts(record.object);
  const { content, problem, reload } = useLoad(() => readTenant(name), null);
  const stored = content?.stored ?? null;
  // Removed keys are gone: their secrets are stored nowhere.
  const changes = record.changes.filter(({ field }) => field !== "keys");
  const rows = changes.map(({ field, was, is }) => {
    const now = stored ? presentValue(stored.settings, field) : null;
    return { field, was, now, isChangedSince: stored !== null && JSON.stringify(now) !== JSON.stringify(is) };
  });
  const restore = async () => {
    if (!content) throw new RequestError(0, "the tenant could not be read");
    const headers: Record<string, string> = stored ? { "if-match": stored.etag } : { "if-none-match": "*" };
    const method = stored ? "PATCH" : "PUT";
    try {
      await send(named("/admin/tenants", name), { method, body: record.restore ?? {}, headers });
    } catch (error) {
      if (!(error instanceof RequestError) || error.status !== 412) throw error;
      reload();
      throw new RequestError(412, `${name} was changed meanwhile. Look at what it is now, and restore again if that is still right.`);
    }
    notify(`${name} is again what it was before ${record.action} by ${record.actor}.`);
    onDone();
  };
  return (
    <Confirm title={`Restore ${record.object}?`} verb="Restore" action={restore} onClose={onClose}>
      <Problem>{problem?.message}</Problem>
      {!content && !problem && <Skeleton />}
      {content && !stored && <p>The tenant was removed. It is made again with the settings below, and without keys.</p>}
      {stored?.in_file && <p class="note">router.yaml defines this tenant too: its settings there apply.</p>}
      {content && (
        <table class="plain" id="restored">
          <caption class="unseen">What is set</caption>
          <thead>
            <tr>
              <th scope="col">Setting</th>
              <th scope="col">Now</th>
              <th scope="col">After</th>
            </tr>
          </thead>
          <tbody>
            {rows.map(({ field, was, now, isChangedSince }) => (
              <tr key={field}>
                <td>{fieldText(field)}</td>
                <td>
                  <bdi>{valueText(now)}</bdi>
                  {isChangedSince && <div class="changed-since">changed since this record</div>}
                </td>
                <td>
                  <bdi>{valueText(was)}</bdi>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Confirm>
  );
}
