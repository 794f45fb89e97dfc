// A share of a bound. It turns to the colors of a warning from 80 percent and of a failure from 100.
import { percent } from "../lib/format.ts";
import type { Tone } from "./badge.tsx";

export interface MeterProps {
  share: number;
  label: string;
  // Of a share that is no reason to worry, such as progress.
  tone?: Tone;
}

export function Meter({ share, label, tone = share >= 1 ? "bad" : share >= 0.8 ? "warn" : "good" }: MeterProps) {
  const shown = Math.max(0, Math.min(1, share));
  return (
    <div
      class={`meter tone-${tone}`}
      role="meter"
      aria-label={label}
      aria-valuenow={Math.round(shown * 100)}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuetext={percent(share)}
      title={`${label}: ${percent(share)}`}
    >
      <span style={{ width: `${shown * 100}%` }} />
    </div>
  );
}
