// Who the key is, and what it may do.
import { duration, moment } from "../../lib/format.ts";
import { Badge } from "../../ui/badge.tsx";
import { Card, type CardProps } from "../../ui/card.tsx";
import { KeyValues } from "../../ui/key-values.tsx";
import type { OwnUsage } from "./own.ts";

const SOON_S = 14 * 86_400;
const MODELS_SHOWN = 12;

function Expiry({ atS }: { atS: number | null }) {
  if (atS === null) return <>never</>;
  const left = atS - Date.now() / 1000;
  return (
    <>
      {moment(atS)}{" "}
      {left < SOON_S && <Badge value="expiring" label={left > 0 ? `in ${duration(left)}` : "expired"} />}
    </>
  );
}

const Chips = ({ names }: { names: string[] }) => (
  <span class="chips">
    {names.slice(0, MODELS_SHOWN).map((name) => (
      <bdi class="chip" key={name} title={name}>
        {name}
      </bdi>
    ))}
    {names.length > MODELS_SHOWN && <span class="note">{`and ${names.length - MODELS_SHOWN} more`}</span>}
  </span>
);

export function KeyCard({ usage, span }: { usage: OwnUsage; span: CardProps["span"] }) {
  return (
    <Card title="Key" span={span} id="own-key">
      <KeyValues
        rows={[
          ["Tenant", usage.tenant],
          ["Key", usage.key],
          ["May", usage.scopes.length ? <Chips names={usage.scopes} /> : "do nothing"],
          ["Models", usage.models ? <Chips names={usage.models} /> : "all models"],
          ["Expires", <Expiry atS={usage.expires_s} />],
        ]}
      />
    </Card>
  );
}
