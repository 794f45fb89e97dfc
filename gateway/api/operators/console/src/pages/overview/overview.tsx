// Overview: is it well, who uses it, what does it cost, what failed.
import { zone } from "../../lib/format.ts";
import { useHistory } from "../../lib/history.ts";
import { useRange } from "../../lib/range.ts";
import { useStatus } from "../../lib/status.ts";
import { useTraffic } from "../../lib/traffic.ts";
import { Grid } from "../../ui/card.tsx";
import { CostChart, FailuresChart, LatencyChart, TokensChart, TrafficChart } from "../../ui/history-charts.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Skeleton } from "../../ui/states.tsx";
import { Busiest } from "./busiest.tsx";
import { Changes } from "./changes.tsx";
import { FailedCalls } from "./failed-calls.tsx";
import { Figures } from "./figures.tsx";
import { Health } from "./health.tsx";
import { Lanes } from "./lanes.tsx";
import { nowOf } from "./now.ts";
import { troublesOf } from "./troubles.ts";
import { WaitingChart } from "./waiting-chart.tsx";

const KEPT = {
  redis: "The charts count all gateways of this Redis.",
  state_dir: "The charts count this gateway, over its restarts.",
  memory: "The charts begin with the start of this gateway: set state_dir or a Redis to keep them over restarts.",
};

export function Overview() {
  const range = useRange();
  const { snapshot, rates } = useStatus();
  const { points } = useTraffic();
  const { content: history, problem } = useHistory(range);
  if (!snapshot) {
    return (
      <Page title="Overview">
        <Skeleton rows={6} height={60} />
      </Page>
    );
  }
  const now = points && nowOf(points);
  const shown = { history, problem, range };
  const note = history ? `${KEPT[history.kept]} Times: ${zone(snapshot.at_s)}.` : undefined;
  return (
    <Page title="Overview" actions={<RangePicker range={range} />}>
      <Health snapshot={snapshot} troubles={troublesOf(snapshot, now)} />
      <Figures snapshot={snapshot} now={now} points={points ?? []} />
      <Grid id="charts">
        <TrafficChart {...shown} />
        <LatencyChart {...shown} />
        <Busiest by="tenant" range={range} currency={snapshot.currency} />
        <Busiest by="model" range={range} currency={snapshot.currency} />
        <FailedCalls />
        <FailuresChart {...shown} />
        <TokensChart {...shown} />
        {snapshot.currency && <CostChart {...shown} />}
        <WaitingChart points={points} />
        <Changes snapshot={snapshot} />
        <Lanes snapshot={snapshot} rates={rates} />
      </Grid>
      {note && <p class="note page-foot">{note}</p>}
    </Page>
  );
}
