// Traffic, latency, tokens and cost of a tenant over time.
import { useHistory } from "../../lib/history.ts";
import { useRange } from "../../lib/range.ts";
import { Grid } from "../../ui/card.tsx";
import { CostChart, LatencyChart, TokensChart, TrafficChart } from "../../ui/history-charts.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";

export function TenantCharts({ name, hasCost }: { name: string; hasCost: boolean }) {
  const range = useRange("24h");
  const { content: history, problem } = useHistory(range, { tenant: name });
  const shared = { history, problem, range };
  return (
    <section class="tenant-charts" aria-label="History">
      <div class="section-head">
        <h2>History</h2>
        <RangePicker range={range} />
      </div>
      <Grid>
        <TrafficChart {...shared} />
        <LatencyChart {...shared} />
        <TokensChart {...shared} span={hasCost ? 6 : 12} />
        {hasCost && <CostChart {...shared} />}
      </Grid>
    </section>
  );
}
