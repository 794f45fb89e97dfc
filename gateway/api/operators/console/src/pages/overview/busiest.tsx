// Who uses it: the models or tenants with the most of a metric, with shares, cost and course.
import { useState } from "preact/hooks";
import { FlaskConical } from "lucide";
import { count, money, percent, plural, short } from "../../lib/format.ts";
import { type TopBy, type TopMetric, type TopRow, useTop } from "../../lib/history.ts";
import type { Range } from "../../lib/range.ts";
import { href } from "../../lib/route.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Sparkline } from "../../ui/sparkline.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import { ShareBar } from "./share-bar.tsx";

const LIMIT = 6;
const METRICS: [TopMetric & ("calls" | "tokens" | "cost"), string][] = [
  ["calls", "Calls"],
  ["tokens", "Tokens"],
  ["cost", "Cost"],
];
type Metric = (typeof METRICS)[number][0];

const amount = (metric: Metric, value: number, currency: string | null) =>
  metric === "cost" ? money(value, currency) : short(value);

function More({ row, metric, currency }: { row: TopRow; metric: Metric; currency: string | null }) {
  const parts = [
    metric === "calls" ? `${short(row.tokens)} tokens` : `${short(row.calls)} calls`,
    metric !== "cost" && currency && row.cost > 0 ? money(row.cost, currency) : "",
  ];
  const failed = row.failed - row.refused;
  return (
    <span class="top-more">
      {parts.filter(Boolean).join(" · ")}
      {failed > 0 && <b class="top-failed">{`${percent(failed / row.calls)} failed`}</b>}
      {row.refused > 0 && <span>{`${count(row.refused)} refused`}</span>}
    </span>
  );
}

function Row({ row, by, metric, total, currency }: { row: TopRow; by: TopBy; metric: Metric; total: number; currency: string | null }) {
  const share = total ? row[metric] / total : 0;
  return (
    <li>
      <a href={href(`${by}s`, [row.name])} class="top-row">
        <Clip text={row.name} class="top-name" />
        <Sparkline values={row.points} />
        <b class="top-amount">{amount(metric, row[metric], currency)}</b>
        <span class="top-share">{percent(share)}</span>
        <ShareBar share={share} />
        <More row={row} metric={metric} currency={currency} />
      </a>
    </li>
  );
}

export function Busiest({ by, range, currency }: { by: TopBy; range: Range; currency: string | null }) {
  const [metric, setMetric] = useState<Metric>("calls");
  const { content, problem } = useTop(range, by, metric, LIMIT);
  const offered = METRICS.filter(([name]) => name !== "cost" || currency);
  const listed = content?.data.filter((row) => row.calls > 0) ?? [];
  const total = listed.reduce((sum, row) => sum + row[metric], 0) + (content?.others_total ?? 0);
  return (
    <Card
      title={`Busiest ${by}s`}
      span={6}
      id={`busiest-${by}s`}
      actions={
        <div class="segments" role="group" aria-label={`Order of the ${by}s`}>
          {offered.map(([name, title]) => (
            <button key={name} type="button" aria-pressed={name === metric} onClick={() => setMetric(name)}>
              {title}
            </button>
          ))}
        </div>
      }
    >
      <Failure problem={problem} />
      {!content && !problem && <Skeleton rows={5} height={34} />}
      {content && !listed.length && (
        <Empty
          title="No calls in this time"
          action={
            <Button icon={FlaskConical} href={href("playground")}>
              Try a model
            </Button>
          }
        >
          {`The ${by}s with the most calls${currency ? ", tokens and cost" : " and tokens"} are listed here.`}
        </Empty>
      )}
      {listed.length > 0 && (
        <ol class="top">
          {listed.map((row) => (
            <Row key={row.name} row={row} by={by} metric={metric} total={total} currency={currency} />
          ))}
        </ol>
      )}
      {content && content.others > 0 && (
        <p class="note top-others">
          <a href={href(`${by}s`)}>{`${plural(content.others, `other ${by}`)}`}</a>
          {content.others_total ? `: ${amount(metric, content.others_total, currency)}` : ""}
        </p>
      )}
      {content && Boolean(content.unnamed_total) && (
        <p class="note top-others">{`Without a ${by}: ${amount(metric, content.unnamed_total!, currency)}${
          metric === "calls" ? ", most of them refused before their body was read" : ""
        }`}</p>
      )}
    </Card>
  );
}
