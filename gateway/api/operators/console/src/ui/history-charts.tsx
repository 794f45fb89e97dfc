// The charts of a history, each in a card: calls by outcome, latency, tokens, cost, and failures by kind. Drawing a
// span in one of them zooms all charts of the page.
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import type { RequestError } from "../lib/api.ts";
import { milliseconds, money, percent, short, words } from "../lib/format.ts";
import type { History } from "../lib/history.ts";
import {
  brokenOf,
  DAY,
  failureKinds,
  HOUR,
  inUnit,
  okOf,
  ratesOf,
  timesOf,
  totalOf,
  unitFor,
} from "../lib/history-series.ts";
import type { Range } from "../lib/range.ts";
import { Card, type CardProps } from "./card.tsx";
import { Chart, type Series } from "./chart.tsx";
import { Failure, Skeleton } from "./states.tsx";

const HEIGHT = 190;
const KIND_COLORS = ["bad", "series-2", "series-4", "series-7", "series-5", "series-3"];
const NO_CALLS = "No calls in this time";

export interface HistoryChartProps {
  // Null while it is read.
  history: History | null;
  // Why it could not be read.
  problem?: RequestError | null;
  range: Range;
  span?: CardProps["span"];
  title?: string;
  actions?: ComponentChildren;
}

interface Content {
  title: string;
  note?: string;
  series: Series[];
  format: (value: number) => string;
  empty?: string;
}

function HistoryChart(props: HistoryChartProps & { name: string; content: (history: History) => Content }) {
  const { history, problem = null, range, span = 6, title, actions, name, content } = props;
  // A page that renders each second draws again only what has changed.
  const made = useMemo(() => history && { ...content(history), times: timesOf(history) }, [history]);
  return (
    <Card title={title ?? made?.title ?? name} note={made?.note} span={span} actions={actions}>
      {(!made || problem?.status !== 0) && <Failure problem={problem} />}
      {!made && !problem && <Skeleton rows={1} height={HEIGHT + 26} />}
      {made && (
        <Chart
          title={made.title}
          times={made.times}
          series={made.series}
          format={made.format}
          onZoom={range.zoom}
          height={HEIGHT}
          empty={made.empty ?? NO_CALLS}
        />
      )}
    </Card>
  );
}

export const TrafficChart = (props: HistoryChartProps) => (
  <HistoryChart
    {...props}
    name="Calls"
    content={(history) => {
      const unit = unitFor(ratesOf(history, ({ calls }) => calls));
      const [calls, failed] = [totalOf(history, (point) => point.calls), totalOf(history, (point) => point.failed)];
      const line = (name: string, color: string, of: typeof okOf, more?: Partial<Series>): Series => ({
        name,
        color,
        values: inUnit(ratesOf(history, of), unit),
        ...more,
      });
      return {
        title: `Calls per ${unit.name}`,
        note: calls ? `${short(calls)} calls, ${percent(failed / calls)} without success` : undefined,
        format: short,
        series: [
          line("ok", "series-1", okOf, { isArea: true }),
          line("refused by limits", "warn", ({ refused }) => refused, { dash: [8, 4] }),
          line("failed", "bad", brokenOf, { dash: [3, 3] }),
        ],
      };
    }}
  />
);

export const LatencyChart = (props: HistoryChartProps) => (
  <HistoryChart
    {...props}
    name="Latency"
    content={({ points }) => ({
      title: "Latency of interactive calls",
      note: "Without bulk calls and lines of batches",
      format: milliseconds,
      empty: "No interactive calls in this time",
      series: [
        { name: "p50", values: points.map(({ p50_s }) => p50_s), color: "series-1" },
        { name: "p95", values: points.map(({ p95_s }) => p95_s), color: "series-2", dash: [8, 4] },
        { name: "p99", values: points.map(({ p99_s }) => p99_s), color: "series-4", dash: [3, 3] },
      ],
    })}
  />
);

export const TokensChart = (props: HistoryChartProps) => (
  <HistoryChart
    {...props}
    name="Tokens"
    content={(history) => {
      const rates = ratesOf(history, ({ tokens }) => tokens);
      const unit = unitFor(rates);
      const total = totalOf(history, ({ tokens }) => tokens);
      return {
        title: `Tokens per ${unit.name}`,
        note: total ? `${short(total)} tokens` : undefined,
        format: short,
        series: [{ name: "tokens", values: inUnit(rates, unit), color: "series-3", isArea: true }],
      };
    }}
  />
);

export const CostChart = (props: HistoryChartProps) => (
  <HistoryChart
    {...props}
    name="Cost"
    content={(history) => {
      const rates = ratesOf(history, ({ cost }) => cost);
      const unit = unitFor(rates, [HOUR, DAY], 0.01);
      const total = totalOf(history, ({ cost }) => cost);
      const name = history.currency ?? "cost";
      return {
        title: `Cost per ${unit.name}`,
        note: total ? money(total, history.currency) : undefined,
        format: short,
        empty: history.currency ? NO_CALLS : "No model has a price",
        series: total ? [{ name, values: inUnit(rates, unit), color: "series-5", isArea: true }] : [],
      };
    }}
  />
);

// With those that limits refused. Of one model or tenant the kinds are not kept: the line is that of all.
export const FailuresChart = (props: HistoryChartProps) => (
  <HistoryChart
    {...props}
    name="Failures"
    content={(history) => {
      const unit = unitFor(ratesOf(history, ({ failed }) => failed));
      const total = totalOf(history, ({ failed }) => failed);
      const kinds = failureKinds(history).map(([kind]) => kind);
      // Each keeps its color while the order of the counts changes.
      const named = kinds.slice(0, KIND_COLORS.length).sort();
      const rest = new Set(kinds.slice(KIND_COLORS.length));
      const line = (name: string, color: string, has: (kind: string) => boolean): Series => {
        const sum = (failures: Record<string, number> | null) =>
          failures && Object.entries(failures).reduce((found, [kind, calls]) => found + (has(kind) ? calls : 0), 0);
        return { name, color, values: inUnit(ratesOf(history, ({ failures }) => sum(failures)), unit) };
      };
      const series = named.map((kind, index) => line(words(kind), KIND_COLORS[index]!, (other) => other === kind));
      if (rest.size) series.push(line("others", "series-8", (kind) => rest.has(kind)));
      const all: Series = { name: "failed", values: inUnit(ratesOf(history, ({ failed }) => failed), unit), color: "bad" };
      return {
        title: `Failures per ${unit.name}`,
        note: total ? `${short(total)} calls, with those that limits refused` : undefined,
        format: short,
        empty: "Every call succeeded in this time",
        series: kinds.length ? series : total ? [all] : [],
      };
    }}
  />
);
