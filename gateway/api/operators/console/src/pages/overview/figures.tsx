// The numbers of the moment, each with its course and a link to what explains it.
import { useMemo } from "preact/hooks";
import { count, milliseconds, money, NONE, percent, plural, short } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import type { TrafficPoint } from "../../lib/traffic.ts";
import type { Snapshot } from "../../lib/types.ts";
import { Stat } from "../../ui/stat.tsx";
import { courseOf, type Now } from "./now.ts";
import { useSpend } from "./spend.ts";

const BAD_SHARE = 0.01;
// Cents where there are any, else three digits.
const amount = (value: number) => (value >= 0.1 || value === 0 ? money(value) : short(value));

function failedNote({ refused, mistaken }: Now) {
  const parts = [
    refused ? `${percent(refused)} refused by limits` : "",
    mistaken ? `${percent(mistaken)} callers' mistakes` : "",
  ].filter(Boolean);
  return parts.join(" · ") || "nothing refused by limits";
}

function SpendFigure({ currency, tenants }: { currency: string; tenants: number }) {
  const { today, course, month, isMonthAway } = useSpend(tenants);
  const forecast = month?.forecast ?? null;
  const ahead = forecast === null ? "no forecast before a full day" : `forecast ${amount(forecast)}`;
  return (
    <Stat
      id="figure-spend"
      label={`Spend today, ${currency}`}
      value={today === null ? NONE : amount(today)}
      note={month ? `${amount(month.cost)} this month · ${ahead}` : isMonthAway ? "The month cannot be read now" : "The month is added up…"}
      values={course}
      href={href("tenants")}
    />
  );
}

export function Figures({ snapshot, now, points }: { snapshot: Snapshot; now: Now | null; points: TrafficPoint[] }) {
  const course = useMemo(() => courseOf(points), [points]);
  const failed = now?.failed ?? null;
  const waiting = snapshot.lanes.reduce((sum, { queued_inputs }) => sum + queued_inputs, 0);
  return (
    <div class="stats figures" id="figures">
      <Stat
        label="Calls/s"
        value={short(now?.calls)}
        note={`from ${plural(snapshot.tenant_totals.tenants, "tenant")} since the start`}
        values={course.calls}
        href={href("calls")}
      />
      <Stat
        label="Interactive p95"
        value={milliseconds(now?.p95)}
        note={`p50 ${milliseconds(now?.p50)} · p99 ${milliseconds(now?.p99)}`}
        values={course.p95}
        href={href("upstreams")}
      />
      <Stat
        label="Failed"
        value={percent(failed)}
        tone={!failed ? undefined : failed >= BAD_SHARE ? "bad" : "warn"}
        note={now && now.calls > 0 ? failedNote(now) : "no calls in the last minute"}
        values={course.failed}
        href={href("calls", [], { failed: "true" })}
      />
      <Stat
        label="Tokens/s"
        value={short(now?.tokens)}
        note={`${short(snapshot.tenant_totals.tokens)} since the start`}
        values={course.tokens}
        href={href("models")}
      />
      {snapshot.currency && <SpendFigure currency={snapshot.currency} tenants={snapshot.store.tenants} />}
      <Stat
        label="Calls in flight"
        value={count(snapshot.calls_in_flight)}
        note={waiting ? `${plural(waiting, "input")} waiting` : "nothing waits"}
        values={course.inFlight}
        href={href("upstreams")}
      />
    </div>
  );
}
