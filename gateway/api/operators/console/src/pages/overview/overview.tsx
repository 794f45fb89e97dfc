// Overview.
import { ShieldAlert } from "lucide";
import { useRange } from "../../lib/range.ts";
import { useStatus } from "../../lib/status.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { Chart } from "../../ui/chart.tsx";
import { Meter } from "../../ui/meter.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Stat } from "../../ui/stat.tsx";
import { Empty } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";

export function Overview() {
  const range = useRange();
  const { snapshot } = useStatus();
  const times = Array.from({ length: 60 }, (_, at) => 1795896000 + at * 60);
  return (
    <Page title="Overview" note="All is well." actions={<RangePicker range={range} />}>
      <div class="stats">
        <Stat label="Calls per second" value="212" note="12 % more than an hour ago" values={[1, 4, 3, 6, 8, 4, 5]} />
        <Stat label="Latency p95" value="41 ms" tone="warn" values={[1, 4, null, 6, 8, 4, 5]} />
        <Stat label="Failed" value="0.3 %" tone="bad" values={[1, 4, 3, 6, 8, 4, 5]} />
        <Stat label="Spend today" value="12.40 EUR" />
      </div>
      <Grid>
        <Card title="Calls" span={6}>
          <Chart
            title="Calls"
            times={times}
            format={(value) => String(value)}
            onZoom={range.zoom}
            series={[
              { name: "interactive", values: times.map((_, at) => 20 + (at % 13)), color: "series-1", isArea: true },
              { name: "bulk", values: times.map((_, at) => 5 + (at % 7)), color: "series-2" },
            ]}
          />
        </Card>
        <Card title="Busiest" span={6}>
          <Meter share={0.85} label="Tokens" />
          <Empty title="Nothing failed" icon={ShieldAlert} action={<Button kind="primary">Do</Button>}>
            Calls that fail are listed here.
          </Empty>
        </Card>
        <Card title="Replicas" isFlush>
          <Table
            label="Replicas"
            rows={snapshot?.replicas ?? null}
            rowKey={(row) => row.upstream + row.name}
            file="replicas"
            columns={[
              { id: "name", title: "Replica", value: (row) => row.name },
              { id: "state", title: "State", value: (row) => row.state, show: (row) => <Badge value={row.state} /> },
              { id: "reason", title: "Reason", value: (row) => row.reason, kind: "long" },
              { id: "attempts", title: "Attempts", value: (row) => row.attempts, kind: "number" },
            ]}
          />
        </Card>
      </Grid>
    </Page>
  );
}
