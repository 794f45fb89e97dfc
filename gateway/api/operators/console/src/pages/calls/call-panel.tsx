// One call: how it ended and what that means, where its time went, and who and what took part.
import { useMemo } from "preact/hooks";
import { useLoad } from "../../lib/load.ts";
import { milliseconds, moment, words } from "../../lib/format.ts";
import { href, setQuery } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { StageBar } from "../../ui/stage-bar.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import { type Call, isFailed } from "./call.ts";
import { CallFacts } from "./call-facts.tsx";
import { OutcomeBadge } from "./columns.tsx";
import { Finding } from "./finding.tsx";
import { readCalls } from "./use-calls.ts";

export interface CallPanelProps {
  id: string;
  // Its end as the address has it, because a caller may send the same id again.
  at: string | null;
  listed: Call[];
  isFleet: boolean;
}

const close = () => setQuery({ call: null, at: null });

// A shared link may name a call that the filters leave out: then it is asked for by its id.
function useCall({ id, at, listed, isFleet }: CallPanelProps) {
  const find = (calls: Call[]) => {
    const same = calls.filter((call) => call.request_id === id);
    return same.find((call) => String(call.at_s) === at) ?? same[0] ?? null;
  };
  const first = useMemo(() => find(listed), [listed.length > 0]);
  const isSought = first === null;
  const { content, problem } = useLoad(
    async () => ({ found: isSought ? find((await readCalls({ request_id: id }, isFleet)).calls) : null }),
    null,
    `${isSought} ${isFleet}`,
  );
  return { call: first ?? content?.found ?? null, problem, isReading: content === null && !problem };
}

export function CallPanel(props: CallPanelProps) {
  const { snapshot } = useStatus();
  const { call, problem, isReading } = useCall(props);
  if (!call) {
    return (
      <Dialog title="Call" note={props.id} isPanel onClose={close} id="call">
        <Failure problem={problem} />
        {isReading ? <Skeleton /> : <Unknown isFleet={props.isFleet} />}
      </Dialog>
    );
  }
  const title = isFailed(call) ? words(call.outcome).replace(/^./, (first) => first.toUpperCase()) : "Served";
  return (
    <Dialog
      title={title}
      note={`${call.route} · ${moment(call.at_s, "second")} · ${milliseconds(call.duration_s)}`}
      isPanel
      onClose={close}
      id="call"
      actions={
        <>
          {call.tenant && <Button href={href("calls", [], { tenant: call.tenant })}>Calls of this tenant</Button>}
          {call.model && isFailed(call) && (
            <Button href={href("calls", [], { model: call.model, failed: "true" })}>Failed calls of this model</Button>
          )}
        </>
      }
    >
      <div>
        <OutcomeBadge call={call} />
      </div>
      <Finding call={call} />
      <section>
        <h3>{`Time: ${milliseconds(call.duration_s)}`}</h3>
        <StageBar stages={call.stages} durationS={call.duration_s} hasLegend />
      </section>
      <CallFacts call={call} currency={snapshot?.currency ?? null} traceLink={snapshot?.trace_link ?? null} />
    </Dialog>
  );
}

function Unknown({ isFleet }: { isFleet: boolean }) {
  return (
    <Empty
      title="This gateway no longer keeps this call"
      action={!isFleet && <Button onClick={() => setQuery({ fleet: "true" })}>Ask all gateways</Button>}
    >
      Only the newest calls are kept. The log of the gateway has all of them, by their request id.
    </Empty>
  );
}
