// What a change has changed: each field with what it was and what it is.
import { type Change, fieldText, valueText } from "./record.ts";

// most: fields that are shown; the rest are counted.
export function Diff({ changes, most = 40 }: { changes: Change[]; most?: number }) {
  const shown = changes.slice(0, most);
  const left = changes.length - shown.length;
  // Of a new object only what it is.
  const isNew = changes.every(({ was }) => was === null);
  return (
    <dl class="diff">
      {shown.map(({ field, was, is }) => (
        <div key={field}>
          <dt title={field}>{fieldText(field)}</dt>
          <dd>
            {was !== is && !isNew && (
              <>
                <del class={was === null ? "unset" : ""}>
                  <span class="unseen">was </span>
                  <bdi>{valueText(was)}</bdi>
                </del>
                <span aria-hidden="true"> → </span>
              </>
            )}
            <ins class={is === null ? "unset" : ""}>
              <span class="unseen">{was === is || isNew ? "is " : ", is now "}</span>
              <bdi>{valueText(is)}</bdi>
            </ins>
          </dd>
        </div>
      ))}
      {left > 0 && <div class="note">{`and ${left} more`}</div>}
    </dl>
  );
}
