// Traffic, latency, tokens and cost of a tenant over time.
import { useState } from "preact/hooks";
import { ChartLine } from "lucide";
import { useHistory } from "../../lib/history.ts";
import { useRange } from "../../lib/range.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { CostChart, LatencyChart, TokensChart, TrafficChart } from "../../ui/history-charts.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Empty } from "../../ui/states.tsx";

function Charts({ name, hasCost }: { name: string; hasCost: boolean }) {
  const range = useRange("24h");
  const { content: history, problem } = useHistory(range, { tenant: name });
  const shared = { history, problem, range };
  if (problem?.status === 404) {
    return (
      <Card title="History">
        <Empty title="No call is kept" icon={ChartLine}>
          {problem.message}
        </Empty>
      </Card>
    );
  }
  return (
    <>
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
    </>
  );
}

export function TenantCharts({ tenant }: { tenant: Summary }) {
  const { name, today, month, currency } = tenant;
  // The gateway has no history of a tenant that has not called.
  const [isAsked, setAsked] = useState(false);
  const hasCalled = today.calls + today.refused + month.calls > 0;
  return (
    <section class="tenant-charts" aria-label="History">
      {hasCalled || isAsked ? (
        <Charts name={name} hasCost={currency !== null} />
      ) : (
        <Card title="History">
          <Empty title="No call this month" icon={ChartLine} action={<Button onClick={() => setAsked(true)}>Look for earlier calls</Button>}>
            Charts of calls, latency, tokens and cost begin with the first call.
          </Empty>
        </Card>
      )}
    </section>
  );
}
