// The time of a call by stage: a bar, and on demand the legend with times.
import { milliseconds, percent } from "../lib/format.ts";
import { STAGES, type StagePart, stageParts } from "../lib/stages.ts";

export interface StageBarProps {
  stages: Record<string, number>;
  durationS: number;
  hasLegend?: boolean;
}

const colorOf = ({ name }: StagePart) => STAGES[name]?.color ?? "line";

export function StageBar({ stages, durationS, hasLegend }: StageBarProps) {
  const parts = stageParts(stages, durationS);
  const spoken = parts.map(({ name, seconds }) => `${name} ${milliseconds(seconds)}`).join(", ");
  return (
    <>
      <div class={`stages${hasLegend ? " tall" : ""}`} role="img" aria-label={`Stages: ${spoken || "none"}`} title={spoken}>
        {parts.map((part) => (
          <span key={part.name} class={`bg-${colorOf(part)}`} style={{ width: `${part.share * 100}%` }} />
        ))}
      </div>
      {hasLegend && (
        <ul class="stage-legend">
          {parts.map((part) => (
            <li key={part.name}>
              <span class={`swatch bg-${colorOf(part)}`} />
              <b>{part.name}</b>
              <span class="note">{STAGES[part.name]?.means}</span>
              <span class="number">{milliseconds(part.seconds)}</span>
              <span class="number note">{percent(part.share)}</span>
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
