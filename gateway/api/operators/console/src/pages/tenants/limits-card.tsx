// All limits that apply to a tenant, with their meters, the fullest first.
import { useState } from "preact/hooks";
import { Gauge } from "lucide";
import { plural } from "../../lib/format.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Empty } from "../../ui/states.tsx";
import { LimitUse } from "./limit-use.tsx";

const SHOWN = 8;

export function LimitsCard({ tenant, onEdit }: { tenant: Summary; onEdit?: () => void }) {
  const [isAll, setAll] = useState(false);
  const limits = tenant.limits.toSorted((one, other) => other.share - one.share);
  return (
    <Card title="Limits" span={7} id="limits" note="Of the tenant, its keys, and its use of single models. A changed limit counts from its change.">
      {limits.length ? (
        <div class="limit-list">
          {limits.slice(0, isAll ? undefined : SHOWN).map((use) => (
            <LimitUse key={use.limit} use={use} currency={tenant.currency} />
          ))}
          {limits.length > SHOWN && (
            <Button isSmall kind="ghost" onClick={() => setAll(!isAll)}>
              {isAll ? "Show the fullest only" : `Show all ${plural(limits.length, "limit")}`}
            </Button>
          )}
        </div>
      ) : (
        <Empty title="No limit" icon={Gauge} action={onEdit && <Button onClick={onEdit}>Set a limit</Button>}>
          Its calls are bounded by the gateway alone, and share it by weight.
        </Empty>
      )}
    </Card>
  );
}
