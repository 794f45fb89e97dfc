// Recent calls: a live table, newest first, and for one of them a panel with all that is known of it.
import { useState } from "preact/hooks";
import { Pause, Play, RefreshCw } from "lucide";
import { plural } from "../../lib/format.ts";
import { go, href, useParam, useRoute } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Filters, SwitchFilter, TextFilter } from "../../ui/filters.tsx";
import { Page } from "../../ui/page.tsx";
import { Failure, Problem } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { type Call, keyOf } from "./call.ts";
import { CallPanel } from "./call-panel.tsx";
import { columnsOf } from "./columns.tsx";
import { useCalls } from "./use-calls.ts";

function useCallParam() {
  const { query } = useRoute();
  const addressOf = (call: Call) => {
    const parameters = Object.fromEntries(query);
    return href("calls", [], { ...parameters, call: call.request_id, at: call.at_s });
  };
  return { chosen: query.get("call"), chosenAt: query.get("at"), addressOf };
}

export function Calls() {
  const { snapshot } = useStatus();
  const { chosen, chosenAt, addressOf } = useCallParam();
  const [isPaused, setPaused] = useState(false);
  const [isRead, setRead] = useState(false);
  const [isAll] = useParam("fleet");
  const isHeld = isPaused || isRead || chosen !== null;
  const { calls, content, problem, newer, isFleet, reload } = useCalls(!isPaused, isHeld);
  const models = snapshot?.models.map(({ name }) => name) ?? [];
  const tenants = [...new Set(calls?.map(({ tenant }) => tenant ?? "").filter(Boolean))];
  const missing = content?.missing.length ? `Not answered: ${content.missing.join(", ")}.` : "";
  const state = newer ? `${plural(newer, "newer call")}` : isRead && !isPaused ? "Held while you read" : "";
  return (
    <Page
      title="Recent calls"
      note={`The last ${content?.kept ?? 250} calls of each gateway, without any content. The log has all of them.`}
      actions={
        <>
          <span class="note" id="calls-state">
            {isFleet ? "All gateways were asked once" : state}
          </span>
          {isFleet ? (
            <Button icon={RefreshCw} onClick={reload}>
              Ask again
            </Button>
          ) : (
            <Button icon={isPaused ? Play : Pause} onClick={() => setPaused(!isPaused)}>
              {isPaused ? "Go live" : "Pause"}
            </Button>
          )}
        </>
      }
    >
      <Failure problem={problem} id="calls-problem" />
      {isAll && <Problem id="calls-missing">{content?.problem || missing}</Problem>}
      <Card isFlush id="calls">
        <Filters label="Filters of calls">
          <TextFilter name="tenant" label="Tenant" options={tenants} />
          <TextFilter name="model" label="Model" options={models} />
          <TextFilter name="key" label="Key" placeholder="id of a key" />
          <TextFilter name="request_id" label="Request id" placeholder="a part of it" />
          <SwitchFilter name="failed" label="Only failed" />
          <SwitchFilter name="all" label="All requests" />
          <SwitchFilter name="fleet" label="All gateways" />
        </Filters>
        <div
          onPointerEnter={(event) => event.pointerType === "mouse" && setRead(true)}
          onPointerLeave={() => setRead(false)}
        >
          <Table
            label="Recent calls"
            columns={columnsOf(addressOf, isFleet)}
            rows={problem && !calls ? [] : calls}
            rowKey={keyOf}
            file="calls"
            isSearched={false}
            onOpen={(call) => go(addressOf(call))}
            isSelected={(call) => call.request_id === chosen && String(call.at_s) === chosenAt}
            empty={{ title: "No call matches", children: "Calls of models appear here as they end. Names in the filters are compared whole." }}
          />
        </div>
      </Card>
      {chosen && <CallPanel key={`${chosen} ${chosenAt}`} id={chosen} at={chosenAt} listed={calls ?? []} isFleet={isFleet} />}
    </Page>
  );
}
