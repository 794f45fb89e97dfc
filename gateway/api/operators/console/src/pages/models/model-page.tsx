// One model: what it offers, where it is served, its health, its traffic, and code that calls it.
import { useState } from "preact/hooks";
import { Pencil, Trash2 } from "lucide";
import { useAdditions } from "../../lib/additions.ts";
import { useHealth } from "../../lib/health.ts";
import { useHistory } from "../../lib/history.ts";
import { useRange } from "../../lib/range.ts";
import { go, href } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { useAccess } from "../../shell/access.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { HealthLegend } from "../../ui/health-legend.tsx";
import { CostChart, LatencyChart, TokensChart, TrafficChart } from "../../ui/history-charts.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Empty, Problem, Skeleton } from "../../ui/states.tsx";
import { AffectedTenants } from "./affected.tsx";
import { Calling } from "./calling.tsx";
import { ModelFacts } from "./model-facts.tsx";
import { ModelReplicas } from "./model-replicas.tsx";
import { ModelUpstreams } from "./model-upstreams.tsx";
import { NamePanel } from "./name-panel.tsx";
import { RemoveName } from "./remove-name.tsx";
import { modelRows } from "./rows.ts";

const PATH: [string, string][] = [["Models", "#/models"]];

export function ModelPage({ name }: { name: string }) {
  const { snapshot } = useStatus();
  const { canChange } = useAccess();
  const range = useRange("24h");
  const history = useHistory(range, { model: name });
  const health = useHealth(range);
  const additions = useAdditions("models");
  const [open, setOpen] = useState<"change" | "remove" | null>(null);
  const row = snapshot && modelRows(snapshot.models, additions, null).find((each) => each.name === name);
  if (!row) {
    return (
      <Page title={name} path={PATH}>
        {snapshot && (additions.content || additions.problem) ? (
          <Empty title="There is no such model" action={<Button onClick={() => go(href("models"))}>All models</Button>}>
            It may have been removed, here or in router.yaml.
          </Empty>
        ) : (
          <Skeleton rows={6} height={40} />
        )}
      </Page>
    );
  }
  const { model, addition } = row;
  const charts = { history: history.content, problem: history.problem, range };
  return (
    <Page
      title={name}
      path={PATH}
      note={
        <span class="brief">
          <Badge value={row.state} />
          {addition && <Badge value="added" tone="info" />}
          {model && <span>{model.backend}</span>}
        </span>
      }
      actions={
        <>
          <RangePicker range={range} />
          {addition && canChange && (
            <>
              <Button icon={Pencil} onClick={() => setOpen("change")}>
                Change
              </Button>
              <Button icon={Trash2} onClick={() => setOpen("remove")}>
                Remove
              </Button>
            </>
          )}
        </>
      }
    >
      <Problem>{addition?.problem}</Problem>
      <Grid>
        <ModelFacts row={row} currency={snapshot.currency} />
        {model && (
          <>
            <Card title="Upstreams" isFlush id="model-upstreams">
              <ModelUpstreams model={model} />
            </Card>
            <Card title="Replicas" isFlush id="model-replicas" actions={health && <HealthLegend />}>
              <ModelReplicas model={model} replicas={snapshot.replicas} health={health} span={`Last ${range.name || "span"}`} />
            </Card>
            <TrafficChart {...charts} />
            <LatencyChart {...charts} />
            <TokensChart {...charts} />
            <CostChart {...charts} />
            <AffectedTenants model={name} />
            <Calling model={model} />
          </>
        )}
      </Grid>
      {open === "change" && (
        <NamePanel
          addition={addition}
          onClose={() => setOpen(null)}
          onSaved={() => {
            additions.reload();
            setOpen(null);
          }}
        />
      )}
      {open === "remove" && <RemoveName name={name} onClose={() => setOpen(null)} onRemoved={() => go(href("models"))} />}
    </Page>
  );
}
