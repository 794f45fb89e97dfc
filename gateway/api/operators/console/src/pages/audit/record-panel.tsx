// One record with all its fields, and the way back to what was before.
import { useState } from "preact/hooks";
import { Undo2 } from "lucide";
import { useAccess } from "../../shell/access.ts";
import { ago, moment } from "../../lib/format.ts";
import { href, setQuery } from "../../lib/route.ts";
import { Button } from "../../ui/button.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { KeyValues } from "../../ui/key-values.tsx";
import { Empty, Skeleton } from "../../ui/states.tsx";
import { Diff } from "./diff.tsx";
import { type AuditRecord, objectParts, timeOf } from "./record.ts";
import { Restore } from "./restore.tsx";

const PAGES: Record<string, string> = { tenant: "tenants", key: "keys", upstream: "upstreams", model: "models", replica: "upstreams", batch: "batches" };

function objectAddress(object: string) {
  const [kind, name] = objectParts(object);
  const page = PAGES[kind];
  if (!page) return null;
  return kind === "tenant" ? href(page, [name]) : href(page, [], { q: name });
}

const close = () => setQuery({ record: null });

export interface RecordPanelProps {
  id: string;
  // Null while they are read.
  listed: AuditRecord[] | null;
  onRestored: () => void;
}

export function RecordPanel({ id, listed, onRestored }: RecordPanelProps) {
  const { canChange } = useAccess();
  const [isRestoring, setRestoring] = useState(false);
  const record = listed?.find((one) => one.id === id);
  if (!record) {
    return (
      <Dialog title="Record" note={id} isPanel onClose={close} id="record">
        {listed ? <Empty title="It is not among these records">Change the filters, or show older ones.</Empty> : <Skeleton />}
      </Dialog>
    );
  }
  const address = objectAddress(record.object);
  return (
    <>
      <Dialog
        title={`${record.action.replace(/^./, (first) => first.toUpperCase())}: ${record.object}`}
        note={`${moment(timeOf(record), "second")} · ${ago(timeOf(record))}`}
        isPanel
        onClose={close}
        id="record"
        actions={
          record.restore &&
          canChange && (
            <Button icon={Undo2} onClick={() => setRestoring(true)}>
              Restore what it was
            </Button>
          )
        }
      >
        {record.changes.length > 0 && (
          <section>
            <h3>Changes</h3>
            <Diff changes={record.changes} />
          </section>
        )}
        <KeyValues
          rows={[
            ["Who", record.actor],
            ["Kind", record.actor_kind],
            ["From", record.address || "–"],
            ["Gateway", record.gateway || "–"],
            ["Object", address ? <a href={address}>{record.object}</a> : record.object],
            ["Time in UTC", record.time],
            record.request_id !== "" && [
              "Request id",
              <>
                <code id="record-request">{record.request_id}</code> <CopyButton text={record.request_id} target="record-request" />
              </>,
            ],
            ["Record", <code>{record.id}</code>],
          ]}
        />
        <p class="row">
          <a href={href("audit", [], { object: record.object })}>All changes of this object</a>
          <a href={href("audit", [], { actor: record.actor })}>All changes by this actor</a>
        </p>
      </Dialog>
      {isRestoring && (
        <Restore
          record={record}
          onClose={() => setRestoring(false)}
          onDone={() => {
            close();
            onRestored();
          }}
        />
      )}
    </>
  );
}
