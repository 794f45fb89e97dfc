// Limits of the tenant and of the key, with what is used of them now.
import { count, money } from "../../lib/format.ts";
import { limitWords } from "../../lib/limits.ts";
import { Card, type CardProps } from "../../ui/card.tsx";
import { Meter } from "../../ui/meter.tsx";
import { Empty } from "../../ui/states.tsx";
import type { OwnUsage, UsedLimit } from "./own.ts";

// The name of a limit: tokens_per_day, or with whose it is in front, as in "key laptop tokens_per_day".
function partsOf(name: string): [scope: string, limit: string] {
  const at = name.lastIndexOf(" ");
  return [name.slice(0, Math.max(0, at)), name.slice(at + 1)];
}

function Row({ used: { limit, used, of, share }, currency }: { used: UsedLimit; currency: string | null }) {
  const [scope, name] = partsOf(limit);
  const isMoney = name.startsWith("budget");
  const shown = (amount: number) => (isMoney ? money(amount, currency) : count(amount));
  return (
    <li>
      <div class="limit-name">
        <span>{limitWords(name, of, currency)}</span>
        {scope && <span class="note">{scope}</span>}
      </div>
      <Meter share={share} label={limit} />
      <span class="note">{`${shown(used)} used, ${shown(Math.max(0, of - used))} left`}</span>
    </li>
  );
}

export function LimitsCard({ usage, span }: { usage: OwnUsage; span: CardProps["span"] }) {
  const used = usage.used.toSorted((one, other) => other.share - one.share);
  return (
    <Card title="Limits" note={used.length ? "What is used of each now, the fullest first" : undefined} span={span} id="own-limits">
      {used.length ? (
        <ul class="limits">
          {used.map((limit) => (
            <Row key={limit.limit} used={limit} currency={usage.currency} />
          ))}
        </ul>
      ) : (
        <Empty title="No limits">Calls are bounded by the gateway alone.</Empty>
      )}
    </Card>
  );
}
