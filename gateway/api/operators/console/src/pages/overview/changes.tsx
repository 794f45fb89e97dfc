// Recent changes of replicas, vector spaces, the store and processes, as a timeline.
import { useState } from "preact/hooks";
import { ago, moment, plural, words } from "../../lib/format.ts";
import type { Snapshot } from "../../lib/types.ts";
import { type Tone, toneOf } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Empty } from "../../ui/states.tsx";

const SHOWN = 8;
const TONES: [RegExp, Tone][] = [
  [/^(up|back|fits|serving)/, "good"],
  [/^(down|away|lost|still lacks|refused|vectors: (?!fits))|hung|ended/, "bad"],
  [/^(drained|slow|probation|withdrawn|joining|gone)/, "warn"],
];

const toneOfChange = (what: string): Tone => TONES.find(([pattern]) => pattern.test(what))?.[1] ?? toneOf(what);

export function Changes({ snapshot }: { snapshot: Snapshot }) {
  const [isWhole, setWhole] = useState(false);
  const { changes } = snapshot;
  const shown = isWhole ? changes : changes.slice(0, SHOWN);
  return (
    <Card
      title="Recent changes"
      span={6}
      id="changes"
      actions={<a href="#/audit">What operators changed</a>}
    >
      {!changes.length && <Empty title="No changes since the start">Replicas that go down or come back are listed here.</Empty>}
      <ol class="timeline">
        {shown.map(({ at_s, subject, what, reason }, index) => (
          <li key={`${at_s} ${subject} ${index}`} class={`tone-${toneOfChange(what)}`}>
            <time dateTime={new Date(at_s * 1000).toISOString()}>
              {moment(at_s, "second")}
            </time>
            <span class="timeline-what">
              <bdi dir="auto">{subject}</bdi> <b>{words(what)}</b>
              {reason && (
                <span class="note" dir="auto">
                  {reason}
                </span>
              )}
            </span>
            <span class="timeline-age">{ago(at_s)}</span>
          </li>
        ))}
      </ol>
      {changes.length > SHOWN && (
        <Button kind="ghost" isSmall onClick={() => setWhole(!isWhole)}>
          {isWhole ? "Show fewer" : `${plural(changes.length - SHOWN, "earlier change")}`}
        </Button>
      )}
    </Card>
  );
}
