// A limit, its used part as a meter, and when all of it is available again.
import { count, duration, money, percent, short } from "../../lib/format.ts";
import { limitTitle } from "../../lib/limits.ts";
import type { LimitState, UsedLimit } from "../../lib/tenants.ts";
import { Clip } from "../../ui/clip.tsx";
import { Meter } from "../../ui/meter.tsx";

const isBudget = ({ limit }: UsedLimit) => /budget_per_[a-z]+$/.test(limit);

function resetsIn({ resets_at_s }: LimitState) {
  const seconds = resets_at_s - Date.now() / 1000;
  return seconds <= 1 ? "resets now" : `resets in ${duration(Math.ceil(seconds))}`;
}

export interface LimitUseProps {
  use: UsedLimit | LimitState;
  currency: string | null;
  // For the cell of a table.
  isShort?: boolean;
}

export function LimitUse({ use, currency, isShort }: LimitUseProps) {
  const number = isShort ? short : count;
  const amount = (value: number) => (isBudget(use) ? money(value) : number(value));
  const title = limitTitle(use.limit);
  const state = "resets_at_s" in use ? use : null;
  return (
    <div class={`limit-use${isShort ? " short" : ""}`}>
      <div class="limit-use-head">
        <Clip text={title} />
        <span>{percent(use.share)}</span>
      </div>
      <Meter share={use.share} label={title} />
      {!isShort && (
        <div class="limit-use-foot note">
          <span>{`${amount(use.used)} of ${amount(use.of)}${isBudget(use) && currency ? ` ${currency}` : ""}`}</span>
          {state && use.used > 0 && <span>{resetsIn(state)}</span>}
        </div>
      )}
    </div>
  );
}
