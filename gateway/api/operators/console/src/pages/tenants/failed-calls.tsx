// The last calls of a tenant that failed, on all gateways.
import { CircleCheck } from "lucide";
import { get, withQuery } from "../../lib/api.ts";
import { ago, moment, words } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";

interface FailedCall {
  at_s: number;
  request_id: string;
  route: string;
  status: number;
  outcome: string;
  model: string | null;
  key_id: string | null;
  upstream_words: string | null;
}

const SHOWN = 10;
const REFRESH_MS = 10_000;

function Row({ call }: { call: FailedCall }) {
  return (
    <li>
      <Badge value={call.outcome} tone={toneOfStatus(call.status)} label={`${call.status} ${words(call.outcome)}`} />
      <Clip text={[call.model ?? call.route, call.upstream_words].filter(Boolean).join(": ")} />
      <span class="note" title={moment(call.at_s)}>
        {ago(call.at_s)}
      </span>
    </li>
  );
}

export function FailedCalls({ name }: { name: string }) {
  const address = withQuery("/admin/calls", { tenant: name, failed: true, fleet: true });
  const { content, problem } = useLoad(() => get<{ calls: FailedCall[] }>(address), REFRESH_MS);
  return (
    <Card
      title="Last errors"
      span={6}
      id="failed-calls"
      note="Of the last calls that the gateways keep."
      actions={
        <Button isSmall href={href("calls", [], { tenant: name, failed: "true" })}>
          Recent calls
        </Button>
      }
    >
      <Failure problem={problem} />
      {!content && !problem && <Skeleton />}
      {content && !content.calls.length && <Empty title="No error" icon={CircleCheck} />}
      {content && content.calls.length > 0 && (
        <ul class="lines">
          {content.calls.slice(0, SHOWN).map((call) => (
            <Row key={call.request_id} call={call} />
          ))}
        </ul>
      )}
    </Card>
  );
}
