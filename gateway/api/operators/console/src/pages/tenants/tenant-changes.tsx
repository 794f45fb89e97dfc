// What operators have changed of a tenant, the newest first. A change of settings can be taken back.
import { useState } from "preact/hooks";
import { History, Undo2 } from "lucide";
import { get, withQuery } from "../../lib/api.ts";
import { ago, moment } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import { Diff } from "../audit/diff.tsx";
import type { AuditRecord } from "../audit/record.ts";
import { Restore } from "../audit/restore.tsx";

const SHOWN = 10;
const REFRESH_MS = 15_000;
const FIELDS_SHOWN = 6;

export interface TenantChangesProps {
  tenant: Summary;
  // Another value reads the records again.
  turn: number;
  canRestore: boolean;
  onRestored: () => void;
}

export function TenantChanges({ tenant, turn, canRestore, onRestored }: TenantChangesProps) {
  const object = `tenant/${tenant.name}`;
  const [chosen, setChosen] = useState<AuditRecord | null>(null);
  const address = withQuery("/admin/audit", { object, limit: SHOWN });
  const { content, problem } = useLoad(() => get<{ data: AuditRecord[] }>(address), REFRESH_MS, String(turn));
  return (
    <Card
      title="Changes"
      span={6}
      id="changes"
      note="By operators, the newest first."
      actions={
        <Button isSmall href={href("audit", [], { object })}>
          Audit
        </Button>
      }
    >
      <Failure problem={problem} />
      {!content && !problem && <Skeleton />}
      {content && !content.data.length && (
        <Empty title="No change" icon={History}>
          {tenant.in_file ? "Changes of router.yaml are not recorded here." : undefined}
        </Empty>
      )}
      {content && content.data.length > 0 && (
        <ol class="records">
          {content.data.map((record) => (
            <li key={record.id}>
              <div class="record-head">
                <b>{record.action}</b>
                <Clip class="note" text={`by ${record.actor}`} />
                <span class="note" title={moment(Date.parse(record.time) / 1000)}>
                  {ago(Date.parse(record.time) / 1000)}
                </span>
                {canRestore && record.action === "change" && record.restore && (
                  <Button isSmall icon={Undo2} onClick={() => setChosen(record)}>
                    Restore
                  </Button>
                )}
              </div>
              <Diff changes={record.changes} most={FIELDS_SHOWN} />
            </li>
          ))}
        </ol>
      )}
      {chosen && (
        <Restore
          record={chosen}
          onClose={() => setChosen(null)}
          onDone={() => {
            setChosen(null);
            onRestored();
          }}
        />
      )}
    </Card>
  );
}
