// The answer to "is it well?": one line if all is well, else the troubles with links to where they are mended.
import { useState } from "preact/hooks";
import { ChevronRight, CircleAlert, CircleCheck, Info, TriangleAlert } from "lucide";
import { duration, plural } from "../../lib/format.ts";
import type { Snapshot } from "../../lib/types.ts";
import { Button } from "../../ui/button.tsx";
import { Icon } from "../../ui/icon.tsx";
import type { Trouble } from "./troubles.ts";

const SHOWN = 5;
const ICONS = { bad: CircleAlert, warn: TriangleAlert, info: Info };

function Well({ snapshot }: { snapshot: Snapshot }) {
  const { models, replicas, uptime_s } = snapshot;
  const facts = [
    `${plural(models.length, "model")} ready`,
    `${plural(replicas.length, "replica")} up`,
    `running for ${duration(uptime_s)}`,
  ];
  return (
    <p class="health-line tone-good" id="health" role="status">
      <Icon of={CircleCheck} />
      <b>All is well</b>
      <span class="health-facts">{facts.join(" · ")}</span>
    </p>
  );
}

export function Health({ snapshot, troubles }: { snapshot: Snapshot; troubles: Trouble[] }) {
  const [isWhole, setWhole] = useState(false);
  if (!troubles.length) return <Well snapshot={snapshot} />;
  const shown = isWhole ? troubles : troubles.slice(0, SHOWN);
  const hidden = troubles.length - shown.length;
  return (
    <section class={`health-line tone-${troubles[0]!.tone}`} id="health" aria-label="Troubles">
      <ul id="troubles">
        {shown.map(({ tone, text, href }) => (
          <li key={text}>
            <a class={`trouble tone-${tone}`} href={href}>
              <Icon of={ICONS[tone]} size={17} />
              <bdi dir="auto">{text}</bdi>
              <Icon of={ChevronRight} size={15} class="trouble-go" />
            </a>
          </li>
        ))}
      </ul>
      {(hidden > 0 || isWhole) && (
        <Button kind="ghost" isSmall onClick={() => setWhole(!isWhole)}>
          {isWhole ? "Show fewer" : `And ${hidden} more`}
        </Button>
      )}
    </section>
  );
}
