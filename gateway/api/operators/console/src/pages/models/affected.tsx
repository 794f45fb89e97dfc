// Whose calls of a model have failed lately, by tenant, on all gateways. The history counts models and tenants apart:
// only the last calls know both.
import { CircleCheck } from "lucide";
import { get, withQuery } from "../../lib/api.ts";
import { ago, moment, plural, words } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import type { Call } from "../calls/call.ts";

const SHOWN = 20;
const REFRESH_MS = 10_000;

export interface Affected {
  // Null for calls without a key that is known.
  tenant: string | null;
  failed: number;
  last: Call;
}

// The tenants of calls, the newest first; the one whose calls failed last is the first.
export function affectedOf(calls: Call[]): Affected[] {
  const found = new Map<string | null, Affected>();
  for (const call of calls) {
    const known = found.get(call.tenant);
    if (known) known.failed += 1;
    else found.set(call.tenant, { tenant: call.tenant, failed: 1, last: call });
  }
  return [...found.values()];
}

function Row({ of: { tenant, failed, last } }: { of: Affected }) {
  return (
    <li>
      <Badge value={last.outcome} tone={toneOfStatus(last.status)} label={`${last.status} ${words(last.outcome)}`} />
      {tenant === null ? (
        <span class="note">without a tenant</span>
      ) : (
        <a href={href("tenants", [tenant])}>
          <Clip text={tenant} />
        </a>
      )}
      <span class="note" title={moment(last.at_s, "second")}>
        {`${plural(failed, "call")}, ${ago(last.at_s)}`}
      </span>
    </li>
  );
}

export function AffectedTenants({ model }: { model: string }) {
  const address = withQuery("/admin/calls", { model, failed: true, fleet: true });
  const { content, problem } = useLoad(() => get<{ calls: Call[] }>(address), REFRESH_MS, model);
  const rows = content && affectedOf(content.calls);
  return (
    <Card
      title="Tenants with errors"
      span={6}
      id="affected"
      note="Of the last calls that the gateways keep."
      actions={
        <Button isSmall href={href("calls", [], { model, failed: "true" })}>
          Failed calls
        </Button>
      }
    >
      <Failure problem={problem} />
      {!rows && !problem && <Skeleton />}
      {rows && !rows.length && <Empty title="No error" icon={CircleCheck} />}
      {rows && rows.length > 0 && (
        <ul class="lines">
          {rows.slice(0, SHOWN).map((row) => (
            <Row key={row.tenant ?? ""} of={row} />
          ))}
        </ul>
      )}
      {rows && rows.length > SHOWN && <p class="note">{`and ${plural(rows.length - SHOWN, "more tenant")}`}</p>}
    </Card>
  );
}
