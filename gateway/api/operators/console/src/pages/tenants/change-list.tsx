// Fields with what they were and what they are.
import { ArrowRight } from "lucide";
import { fieldTitle, fieldValue } from "../../lib/field-words.ts";
import type { ChangedField } from "../../lib/tenants.ts";
import { Clip } from "../../ui/clip.tsx";
import { Icon } from "../../ui/icon.tsx";

export function ChangeList({ changes, most = 40 }: { changes: ChangedField[]; most?: number }) {
  return (
    <ul class="changes">
      {changes.slice(0, most).map(({ field, was, is }) => (
        <li key={field}>
          <Clip class="note" text={fieldTitle(field)} />
          <span class="change-values">
            <Clip class="was" text={fieldValue(was)} />
            <Icon of={ArrowRight} size={13} />
            <span class="unseen">, now </span>
            <Clip text={fieldValue(is)} />
          </span>
        </li>
      ))}
      {changes.length > most && <li class="note">{`and ${changes.length - most} more`}</li>}
    </ul>
  );
}
