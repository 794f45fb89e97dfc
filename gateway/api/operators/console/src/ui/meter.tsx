// A share of a bound. It turns to the colors of a warning from 80 percent and of a failure from 100.
import { percent } from "../lib/format.ts";

export function Meter({ share, label }: { share: number; label: string }) {
  const tone = share >= 1 ? "bad" : share >= 0.8 ? "warn" : "good";
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
