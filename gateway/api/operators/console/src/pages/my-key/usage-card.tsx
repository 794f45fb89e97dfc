// Settled usage by day, as a chart, and by day, model and key, as a table that can be saved.
import { useMemo } from "preact/hooks";
import { count, money, short } from "../../lib/format.ts";
import { useParam } from "../../lib/route.ts";
import { Card } from "../../ui/card.tsx";
import { Chart } from "../../ui/chart.tsx";
import { TextField } from "../../ui/field.tsx";
import { type Column, Table } from "../../ui/table.tsx";
import { Tabs } from "../../ui/tabs.tsx";
import { Failure } from "../../ui/states.tsx";
import { type UsageRow, useDays, useUsage } from "./own.ts";

const NO_ROWS: UsageRow[] = [];
const DAY_MS = 86_400_000;
type Metric = "tokens" | "requests" | "cost";

// The metric of each day between two, in UTC.
function daily(rows: UsageRow[], since: string, until: string, metric: Metric) {
  const sums = new Map<string, number>();
  for (const row of rows) sums.set(row.day, (sums.get(row.day) ?? 0) + row[metric]);
  const [first, last] = [Date.parse(since), Date.parse(until)];
  const length = Number.isFinite(first) && last >= first ? Math.min(32, (last - first) / DAY_MS + 1) : 0;
  const days = Array.from({ length }, (_, at) => new Date(first + at * DAY_MS).toISOString().slice(0, 10));
  // Noon, so that most zones show the day itself.
  return { times: days.map((day) => Date.parse(day) / 1000 + 43_200), values: days.map((day) => sums.get(day) ?? 0) };
}

function columnsOf(rows: UsageRow[], currency: string | null): Column<UsageRow>[] {
  const hasKeys = rows.some(({ key }) => key);
  const number = (id: "requests" | "inputs" | "images" | "tokens"): Column<UsageRow> => ({
    id,
    title: id === "requests" ? "Calls" : id.replace(/^./, (first) => first.toUpperCase()),
    value: (row) => row[id],
    kind: "number",
    show: (row) => count(row[id]),
  });
  return [
    { id: "day", title: "Day", value: ({ day }) => day },
    { id: "model", title: "Model", value: ({ model }) => model },
    ...(hasKeys ? [{ id: "key", title: "Key", value: ({ key }: UsageRow) => key || null }] : []),
    number("requests"),
    number("inputs"),
    ...(rows.some(({ images }) => images) ? [number("images")] : []),
    number("tokens"),
    ...(currency
      ? [{ id: "cost", title: `Cost (${currency})`, value: ({ cost }: UsageRow) => cost, kind: "number" as const, show: ({ cost }: UsageRow) => money(cost) }]
      : []),
  ];
}

export function UsageCard({ currency }: { currency: string | null }) {
  const days = useDays();
  const { content, problem } = useUsage(days);
  const [metric, setMetric] = useParam("metric", "tokens");
  const rows = content?.data ?? NO_ROWS;
  const metrics = [
    { name: "tokens", title: "Tokens" },
    { name: "requests", title: "Calls" },
    ...(currency ? [{ name: "cost", title: "Cost" }] : []),
  ];
  const chosen = (metrics.some(({ name }) => name === metric) ? metric : "tokens") as Metric;
  const { times, values } = useMemo(() => daily(rows, days.since, days.until, chosen), [rows, days.since, days.until, chosen]);
  const sum = (of: Metric) => rows.reduce((found, row) => found + row[of], 0);
  const cost = currency ? `, ${money(sum("cost"), currency)}` : "";
  const total = `Of all keys of the tenant, in UTC: ${count(sum("requests"))} calls, ${count(sum("tokens"))} tokens${cost}`;
  const title = metrics.find(({ name }) => name === chosen)!.title;
  const series = useMemo(() => [{ name: title, values, color: "series-1", isArea: true }], [values, title]);
  return (
    <Card
      title="Usage by day"
      note={total}
      id="own-usage"
      isFlush
      actions={
        <div class="days">
          <TextField label="From the day" type="date" value={days.since} onInput={days.setSince} />
          <TextField label="Until the day" type="date" value={days.until} onInput={days.setUntil} />
        </div>
      }
    >
      <div class="inset">
        <Failure problem={problem} />
        <Tabs label="Metric" tabs={metrics} chosen={chosen} onChoose={setMetric} />
        <Chart
          title={`${title} by day`}
          times={times}
          series={series}
          format={chosen === "cost" ? (value) => money(value, currency) : short}
          empty="No usage on these days"
          isDaily
        />
      </div>
      <Table
        label="Usage"
        id="usage"
        sort="-day"
        columns={columnsOf(rows, currency)}
        rows={problem && !content ? NO_ROWS : (content?.data ?? null)}
        rowKey={(row) => `${row.day} ${row.model} ${row.key ?? ""}`}
        file={`usage-${days.since}-${days.until}`}
        empty={{ title: "No usage on these days", children: "Choose other days, at most 31 of them." }}
      />
    </Card>
  );
}
