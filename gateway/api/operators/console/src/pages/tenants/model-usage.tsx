// Usage of this month by model.
import { useState } from "preact/hooks";
import { count, plural, spend } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Empty } from "../../ui/states.tsx";

const SHOWN = 8;

export function ModelUsage({ tenant }: { tenant: Summary }) {
  const { currency } = tenant;
  const [isAll, setAll] = useState(false);
  const rows = tenant.by_model.toSorted((one, other) => other.tokens - one.tokens || other.calls - one.calls);
  return (
    <Card title="Models this month" note="Settled usage, in UTC." id="by-model">
      {rows.length ? (
        <div class="scroll" role="region" aria-label="Usage by model" tabIndex={0}>
          <table class="plain">
            <thead>
              <tr>
                <th scope="col">Model</th>
                <th scope="col" class="number">
                  Calls
                </th>
                <th scope="col" class="number">
                  Tokens
                </th>
                {currency && (
                  <th scope="col" class="number">
                    {currency}
                  </th>
                )}
              </tr>
            </thead>
            <tbody>
              {rows.slice(0, isAll ? undefined : SHOWN).map(({ model, calls, tokens, cost }) => (
                <tr key={model}>
                  <td class="long">
                    <a href={href("models", [model])}>
                      <Clip text={model} />
                    </a>
                  </td>
                  <td class="number">{count(calls)}</td>
                  <td class="number">{count(tokens)}</td>
                  {currency && <td class="number">{spend(cost)}</td>}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <Empty title="No usage this month">The first call of one of its keys is counted here.</Empty>
      )}
      {rows.length > SHOWN && (
        <Button isSmall kind="ghost" onClick={() => setAll(!isAll)}>
          {isAll ? "Show the most used only" : `Show all ${plural(rows.length, "model")}`}
        </Button>
      )}
    </Card>
  );
}
