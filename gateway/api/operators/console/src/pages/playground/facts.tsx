// What a call took: time, tokens, price, truncation.
import { count, milliseconds, money } from "../../lib/format.ts";
import { useStatus } from "../../lib/status.ts";
import type { CallFacts } from "../../lib/vectors.ts";
import { useAccess } from "../../shell/access.ts";
import { Badge } from "../../ui/badge.tsx";

// The price of tokens of a model, null if it is not known or nothing. The snapshot is there for operators only.
function usePrice(model: string): { perMillion: number | null; currency: string | null } {
  const { models } = useAccess();
  const { snapshot } = useStatus();
  const listed = models?.find(({ id }) => id === model);
  const known = snapshot?.models.find(({ name }) => name === model)?.price_per_million_tokens;
  const perMillion = (listed?.price_per_million_tokens as number | null | undefined) ?? known ?? null;
  return { perMillion, currency: (listed?.currency as string | undefined) ?? snapshot?.currency ?? null };
}

export function Facts({ model, facts }: { model: string; facts: CallFacts }) {
  const { perMillion, currency } = usePrice(model);
  const price = perMillion !== null && facts.tokens !== null ? (facts.tokens * perMillion) / 1e6 : null;
  return (
    <div class="facts">
      <span>
        <b>{milliseconds(facts.elapsedMs / 1000)}</b> here
        {facts.gatewayMs !== null && `, ${milliseconds(facts.gatewayMs / 1000)} in the gateway`}
      </span>
      {facts.tokens !== null && (
        <span>
          <b>{count(facts.tokens)}</b> tokens
        </span>
      )}
      {price !== null && (
        <span>
          <b>{money(price, currency)}</b>
        </span>
      )}
      {facts.vectors !== undefined && (
        <span>
          <b>{count(facts.vectors)}</b> {facts.vectors === 1 ? "vector" : "vectors"} of <b>{count(facts.width)}</b> numbers
        </span>
      )}
      {facts.space && (
        <span class="mono" title="Vector space: only vectors of the same space can be compared">
          {facts.space}
        </span>
      )}
      {facts.truncated > 0 && <Badge value="truncated" tone="warn" label={`${facts.truncated} truncated: their ends were not read`} />}
    </div>
  );
}
