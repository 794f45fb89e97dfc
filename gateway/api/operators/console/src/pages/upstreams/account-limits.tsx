// The limits of an upstream's account, with what is used of them.
import { percent, plural } from "../../lib/format.ts";
import { limitWords } from "../../lib/limits.ts";
import { useStatus } from "../../lib/status.ts";
import type { Lane } from "../../lib/types.ts";
import { Card } from "../../ui/card.tsx";
import { Meter } from "../../ui/meter.tsx";

export function AccountLimits({ lane }: { lane: Lane }) {
  const { snapshot } = useStatus();
  return (
    <Card title="Limits of its account" span={6} note={`${plural(lane.limited, "request")} waited or moved on for want of room.`}>
      <ul class="account-limits">
        {lane.limits.map(({ name, amount, used_ratio }) => (
          <li key={name}>
            <span>{limitWords(name, amount, snapshot?.currency)}</span>
            <b>{percent(used_ratio)}</b>
            <Meter share={used_ratio} label={name} />
          </li>
        ))}
      </ul>
    </Card>
  );
}
