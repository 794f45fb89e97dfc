// What a reload or an edit of upstreams and models has changed, setting by setting.
import type { Change, ChangeReport } from "../lib/additions.ts";
import { Badge, type Tone } from "./badge.tsx";

const TONES: Record<Change["how"], Tone> = { added: "good", removed: "bad", changed: "info" };

const Lines = ({ changes, label }: { changes: Change[]; label: string }) => (
  <ul class="changes" aria-label={label}>
    {changes.map(({ path, how, detail }) => (
      <li key={path}>
        <Badge value={how} tone={TONES[how]} />
        <code>{path}</code>
        {detail && <span class="note">{detail}</span>}
      </li>
    ))}
  </ul>
);

export function ChangeList({ report }: { report: ChangeReport }) {
  const { changes, needs_restart } = report;
  if (!changes.length && !needs_restart.length) return <p class="note">Nothing has changed.</p>;
  return (
    <div class="stack">
      {changes.length > 0 && <Lines changes={changes} label="Changes" />}
      {needs_restart.length > 0 && (
        <>
          <h3>These need a restart</h3>
          <Lines changes={needs_restart} label="Changes that need a restart" />
        </>
      )}
    </div>
  );
}
