// The states of a replica over time as a strip. Hovering or the arrow keys show one state with its reason; a click or
// Enter opens all of them as a table.
import { useRef, useState } from "preact/hooks";
import { duration, moment, percent, plural, words } from "../lib/format.ts";
import type { ReplicaSpan } from "../lib/history.ts";
import { HealthTable } from "./health-table.tsx";
import { healthSegments, healthTone, type Segment } from "./health-segments.ts";
import { hideTip, showTip } from "./tip.ts";

export interface HealthStripProps {
  // Of the replica.
  name: string;
  // Undefined: nothing is known.
  spans: ReplicaSpan[] | undefined;
  fromS: number;
  untilS: number;
}

function textOf({ state, fromS, untilS, reason, count }: Segment) {
  const many = count > 1 ? `, ${count} states` : "";
  return `${words(state)}${many}, ${moment(fromS)} – ${moment(untilS)} (${duration(untilS - fromS)})${reason ? `\n${reason}` : ""}`;
}

export function HealthStrip({ name, spans = [], fromS, untilS }: HealthStripProps) {
  const place = useRef<HTMLButtonElement>(null);
  const [chosen, setChosen] = useState<number | null>(null);
  const [isOpen, setOpen] = useState(false);
  const segments = healthSegments(spans, fromS, untilS);
  const seconds = (states: Segment[]) => states.reduce((sum, each) => sum + each.untilS - each.fromS, 0);
  const known = seconds(segments);
  if (!known) return <span class="note">not known</span>;
  const isUp = ({ state }: Segment) => state === "up";
  const share = percent(seconds(segments.filter(isUp)) / known);
  const label = `Health of ${name}: up ${share} of ${duration(known)}, ${plural(spans.length - 1, "change")}`;
  const choose = (index: number | null) => {
    const segment = index === null ? undefined : segments[index];
    const box = place.current?.getBoundingClientRect();
    setChosen(segment ? index : null);
    if (!segment || !box) return hideTip();
    const middle = ((segment.fromS + segment.untilS) / 2 - fromS) / (untilS - fromS);
    return showTip(textOf(segment), box.left + middle * box.width, box.top);
  };
  const step = (event: KeyboardEvent) => {
    const last = segments.length - 1;
    const at = chosen ?? last + 1;
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && chosen !== null) event.stopPropagation();
    if (event.key === "Escape") choose(null);
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, next)));
  };
  const hover = (event: PointerEvent) => {
    const box = place.current!.getBoundingClientRect();
    const at = fromS + ((event.clientX - box.left) / box.width) * (untilS - fromS);
    const index = segments.findIndex((segment) => segment.fromS <= at && at < segment.untilS);
    choose(index < 0 ? null : index);
  };
  return (
    <>
      <button
        ref={place}
        type="button"
        class="health"
        aria-label={label}
        onKeyDown={step}
        onPointerMove={hover}
        onPointerLeave={() => choose(null)}
        onBlur={() => choose(null)}
        onClick={() => {
          choose(null);
          setOpen(true);
        }}
      >
        {segments.map((segment, index) => (
          <span
            key={segment.fromS}
            class={`health-${healthTone(segment.state)}${index === chosen ? " chosen" : ""}`}
            style={{
              // A short one at the end stays in sight.
              left: `min(${(100 * (segment.fromS - fromS)) / (untilS - fromS)}%, 100% - 2px)`,
              width: `${(100 * (segment.untilS - segment.fromS)) / (untilS - fromS)}%`,
            }}
          />
        ))}
      </button>
      {isOpen && (
        <HealthTable name={name} spans={spans} note={`Up ${share} of ${duration(known)}.`} onClose={() => setOpen(false)} />
      )}
    </>
  );
}
