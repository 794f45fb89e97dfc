// One upstream: its lane, the limits of its account, its models, settings and replicas.
import { Pencil, RefreshCw, Scale, Trash2 } from "lucide";
import { useAdditions } from "../../lib/additions.ts";
import { useHealth } from "../../lib/health.ts";
import { useRange } from "../../lib/range.ts";
import { go, href } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { HealthLegend } from "../../ui/health-legend.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Empty, Problem, Skeleton } from "../../ui/states.tsx";
import { AccountLimits } from "./account-limits.tsx";
import { LaneStats } from "./lane-stats.tsx";
import { ReplicaTable } from "./replica-table.tsx";
import { upstreamRows } from "./rows.ts";
import { UpstreamModels } from "./upstream-models.tsx";
import { useUpstreamActions } from "./use-actions.tsx";

const PATH: [string, string][] = [["Upstreams", "#/upstreams"]];

export function UpstreamPage({ name }: { name: string }) {
  const { snapshot } = useStatus();
  const range = useRange("24h");
  const health = useHealth(range, name);
  const additions = useAdditions("upstreams");
  const row = snapshot && upstreamRows(snapshot, additions).find((each) => each.name === name);
  const actions = useUpstreamActions(additions, [name]);
  if (!row) {
    return (
      <Page title={name} path={PATH}>
        {snapshot && (additions.content || additions.problem) ? (
          <Empty title="There is no such upstream" action={<Button onClick={() => go(href("upstreams"))}>All upstreams</Button>}>
            It may have been removed, here or in router.yaml.
          </Empty>
        ) : (
          <Skeleton rows={6} height={40} />
        )}
        {actions.dialog}
      </Page>
    );
  }
  const { addition, lane } = row;
  return (
    <Page
      title={name}
      path={PATH}
      note={
        <span class="brief">
          <Badge value={row.state} />
          {addition && <Badge value="added" tone="info" />}
          {row.backend && <span>{row.backend}</span>}
          <span>{`${row.inUse} of ${row.replicas.length} replicas in use`}</span>
        </span>
      }
      actions={
        <>
          {health && <RangePicker range={range} />}
          {lane && actions.verify && (
            <Button icon={Scale} onClick={() => actions.verify?.(row)}>
              Verify
            </Button>
          )}
          {addition && actions.change && (
            <Button icon={Pencil} onClick={() => actions.change?.(row)}>
              Change
            </Button>
          )}
          {addition && actions.remove && (
            <Button icon={Trash2} onClick={() => actions.remove?.(row)}>
              Remove
            </Button>
          )}
          {!addition && actions.reload && (
            <Button icon={RefreshCw} onClick={actions.reload}>
              Read router.yaml again
            </Button>
          )}
        </>
      }
    >
      <Problem>{actions.problem ?? addition?.problem}</Problem>
      {lane && <LaneStats lane={lane} />}
      {lane && (
        <Card title="Replicas" isFlush actions={health && <HealthLegend />}>
          <ReplicaTable
            upstream={name}
            replicas={row.replicas}
            health={health}
            span={`Last ${range.name || "span"}`}
            file="replicas"
            drain={actions.drain}
            putBack={actions.putBack}
          />
        </Card>
      )}
      <Grid>
        {lane && lane.limits.length > 0 && <AccountLimits lane={lane} />}
        <Card title="Models" span={6} note="Names for callers that it serves.">
          <UpstreamModels row={row} />
        </Card>
        <Card title="Settings" span={6} note={addition ? "Added here." : "Of router.yaml: it is changed there."}>
          {addition ? (
            <pre tabIndex={0} aria-label="Settings">
              {JSON.stringify(addition.settings, null, 2)}
            </pre>
          ) : (
            <p class="note">{`Edit upstreams.${name} in the file, then read it again.`}</p>
          )}
        </Card>
      </Grid>
      {actions.dialog}
    </Page>
  );
}
