// Batches: those of all tenants with an operator's key, else those of the key's own tenant.
import { useState } from "preact/hooks";
import { named, send } from "../../lib/api.ts";
import { go, href, useRoute } from "../../lib/route.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Confirm } from "../../ui/confirm.tsx";
import { ChoiceFilter, Filters, TextFilter } from "../../ui/filters.tsx";
import { Page } from "../../ui/page.tsx";
import { Empty, Failure } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { notify } from "../../ui/toast.tsx";
import type { BatchRow } from "./batch.ts";
import { BatchPanel } from "./batch-panel.tsx";
import { columnsOf } from "./columns.tsx";
import { FirstBatch } from "./first-batch.tsx";
import { useBatches } from "./use-batches.ts";

const STATES: [string, string][] = ["", "in_progress", "validating", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"].map(
  (state) => [state, state ? state.replaceAll("_", " ") : "all"],
);

const OWN = "Files of requests that run behind all interactive calls, within 24 hours. These are your tenant's.";
const ALL = "Files of requests that run behind all interactive calls, within 24 hours. These are of all tenants; results are fetched with a key of their tenant.";

function useMatching(rows: BatchRow[] | null) {
  const { query } = useRoute();
  const [state, model] = [query.get("state"), query.get("model")];
  const isFiltered = Boolean(state || model || query.get("tenant"));
  const found = rows?.filter(({ batch }) => (!state || batch.status === state) && (!model || batch.model === model));
  return { found: found ?? null, isFiltered };
}

export function Batches() {
  const { query } = useRoute();
  const { tenant: ownTenant, canChange, models } = useAccess();
  const { isOwn, rows, hasMore, problem, more, reload } = useBatches();
  const { found, isFiltered } = useMatching(rows);
  const [cancelled, setCancelled] = useState<BatchRow | null>(null);
  const chosen = query.get("batch");
  const addressOf = (id: string) => href("batches", [], { ...Object.fromEntries(query), batch: id });
  const mayCancel = isOwn || canChange;
  const cancel = async (id: string) => {
    await send(named(isOwn ? "/v1/batches" : "/admin/batches", id, "/cancel"), { method: "POST" });
    notify(`${id} is being cancelled; its results so far are kept.`);
    reload();
  };
  const row = rows?.find(({ batch }) => batch.id === chosen);
  const model = models?.[0]?.id ?? "MODEL";
  // 404: the gateway has none, and says how it gets them.
  if (problem?.status === 404) {
    return (
      <Page title="Batches" note={isOwn ? OWN : ALL}>
        <Card>
          <Empty title="This gateway has no batches">
            <span id="batches-problem">{problem.message}</span>
          </Empty>
        </Card>
      </Page>
    );
  }
  const isEmpty = rows !== null && rows.length === 0 && !isFiltered;
  return (
    <Page title="Batches" note={<span id="batches-owner">{isOwn ? OWN : ALL}</span>}>
      <Failure problem={problem} id="batches-problem" />
      {isEmpty ? (
        <Card title="Make the first one" id="first-batch">
          <FirstBatch model={model} />
        </Card>
      ) : (
        <Card isFlush id="batches">
          <Filters label="Filters of batches">
            <ChoiceFilter name="state" label="State" options={STATES} />
            <TextFilter name="model" label="Model" options={models?.map(({ id }) => id)} />
            {!isOwn && <TextFilter name="tenant" label="Tenant" />}
          </Filters>
          <Table
            label="Batches"
            columns={columnsOf({ isOwn, addressOf, onCancel: mayCancel ? setCancelled : undefined })}
            rows={problem && !rows ? [] : found}
            rowKey={({ batch }) => batch.id}
            file="batches"
            isSearched={false}
            onOpen={({ batch }) => go(addressOf(batch.id))}
            isSelected={({ batch }) => batch.id === chosen}
            empty={{ title: "No batch matches", children: "Change the filters above, or show older batches." }}
          />
          {hasMore && (
            <div class="more">
              <Button busy={more.busy} onClick={() => void more.run()}>
                Show older
              </Button>
            </div>
          )}
          <Failure problem={more.problem} />
        </Card>
      )}
      {chosen && rows && (
        <BatchPanel
          key={chosen}
          id={chosen}
          row={row}
          canFetch={isOwn || (row?.tenant !== undefined && row.tenant === ownTenant)}
          canCancelIt={mayCancel}
          onCancel={() => row && setCancelled(row)}
        />
      )}
      {cancelled && (
        <Confirm
          title={`Cancel ${cancelled.batch.id}?`}
          verb="Cancel the batch"
          isDanger
          action={() => cancel(cancelled.batch.id)}
          onClose={() => setCancelled(null)}
        >
          <p>Lines that run are finished, and results so far are kept. The other lines are not run.</p>
        </Confirm>
      )}
    </Page>
  );
}
