// All upstreams with their replicas, those in trouble first, some at a time.
import { useState } from "preact/hooks";
import { Download, Plus, RefreshCw, Server } from "lucide";
import { useAdditions } from "../../lib/additions.ts";
import { csvOf, saveFile } from "../../lib/csv.ts";
import { count, plural } from "../../lib/format.ts";
import { useHealth } from "../../lib/health.ts";
import { useRange } from "../../lib/range.ts";
import { useParam } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Stat } from "../../ui/stat.tsx";
import { Empty, Problem, Skeleton } from "../../ui/states.tsx";
import { HealthLegend } from "../../ui/health-legend.tsx";
import { type UpstreamRow, upstreamRows } from "./rows.ts";
import { UpstreamCard } from "./upstream-card.tsx";
import { UpstreamTools } from "./upstream-tools.tsx";
import { useUpstreamActions } from "./use-actions.tsx";

const SHOWN = 8;
const STATES = ["not_applied", "unavailable", "degraded", "ready"];

function found(rows: UpstreamRow[], sought: string, isTrouble: boolean) {
  const text = sought.trim().toLocaleLowerCase();
  const has = (row: UpstreamRow) =>
    [row.name, row.state, row.backend ?? "", ...row.models.map(({ name }) => name), ...row.replicas.flatMap(({ name, state, reason }) => [name, state, reason])].some(
      (value) => value.toLocaleLowerCase().includes(text),
    );
  return rows
    .filter((row) => (!isTrouble || row.state !== "ready") && (!text || has(row)))
    .toSorted((one, other) => STATES.indexOf(one.state) - STATES.indexOf(other.state));
}

function saveReplicas(rows: UpstreamRow[]) {
  const titles = ["upstream", "replica", "state", "reason", "in flight", "window", "latency in s", "attempts", "failed"];
  const lines = rows.flatMap(({ replicas }) =>
    replicas.map((one) => [one.upstream, one.name, one.is_drained ? "drained" : one.state, one.reason, one.in_flight_batches, one.window_batches, one.latency_s, one.attempts, one.failed]),
  );
  saveFile(csvOf([titles, ...lines]), "text/csv", "replicas.csv");
}

export function AllUpstreams() {
  const { snapshot } = useStatus();
  const { canChange } = useAccess();
  const range = useRange("24h");
  const health = useHealth(range);
  const additions = useAdditions("upstreams");
  const [sought, setSought] = useParam("find");
  const [trouble, setTrouble] = useParam("trouble");
  const [more, setMore] = useState(1);
  const rows = snapshot ? upstreamRows(snapshot, additions) : [];
  const actions = useUpstreamActions(additions, rows.filter(({ lane }) => lane).map(({ name }) => name));
  const shown = found(rows, sought, trouble === "1");
  const drained = rows.flatMap(({ replicas }) => replicas).filter(({ is_drained }) => is_drained).length;
  return (
    <Page
      title="Upstreams"
      note={canChange ? "The servers behind the models." : "You can see everything here, and change nothing."}
      actions={
        <>
          {health && <RangePicker range={range} />}
          {actions.reload && (
            <Button icon={RefreshCw} onClick={actions.reload}>
              Read router.yaml again
            </Button>
          )}
          {actions.add && (
            <Button kind="primary" icon={Plus} onClick={actions.add}>
              Add an upstream
            </Button>
          )}
        </>
      }
    >
      <Problem id="put-back-problem">{actions.problem}</Problem>
      {!snapshot ? (
        <Skeleton rows={6} height={60} />
      ) : (
        <>
          <Figures rows={rows} drained={drained} />
          <UpstreamTools sought={sought} onSearch={setSought} isTrouble={trouble === "1"} onTrouble={(on) => setTrouble(on ? "1" : "")}>
            {health && <HealthLegend />}
            <Button kind="ghost" isSmall icon={Download} label="Save as CSV" onClick={() => saveReplicas(shown)} />
          </UpstreamTools>
          <div class="upstreams">
          {shown.slice(0, more * SHOWN).map((row) => (
            <UpstreamCard key={row.name} row={row} health={health} span={`Last ${range.name || "span"}`} {...actions} />
          ))}
          </div>
          {shown.length > more * SHOWN && (
            <p class="card-more">
              <Button onClick={() => setMore(more + 1)}>{`Show more: ${count(shown.length - more * SHOWN)} are left`}</Button>
            </p>
          )}
          {!shown.length && (
            <Empty icon={Server} title={rows.length ? "No upstream is like that" : "No upstreams yet"}>
              {rows.length ? "Clear the filter to see all of them." : "Add one here, or write `upstreams` into router.yaml."}
            </Empty>
          )}
        </>
      )}
      {actions.dialog}
    </Page>
  );
}

function Figures({ rows, drained }: { rows: UpstreamRow[]; drained: number }) {
  const replicas = rows.reduce((sum, row) => sum + row.replicas.length, 0);
  const inUse = rows.reduce((sum, row) => sum + row.inUse, 0);
  const sum = (value: (row: UpstreamRow) => number) => rows.reduce((all, row) => all + value(row), 0);
  const away = replicas - inUse - drained;
  return (
    <div class="stats">
      <Stat
        label="Replicas in use"
        value={`${count(inUse)} of ${count(replicas)}`}
        tone={inUse ? (away > 0 ? "warn" : "good") : "bad"}
        note={[away > 0 && `${count(away)} away`, drained && `${count(drained)} drained`].filter(Boolean).join(", ") || "all of them"}
      />
      <Stat label="Upstreams" value={count(rows.length)} note={plural(rows.filter(({ state }) => state !== "ready").length, "with trouble", "with trouble")} />
      <Stat label="Batches in flight" value={count(sum(({ lane }) => lane?.in_flight_batches ?? 0))} note={`of ${count(sum(({ lane }) => lane?.window_batches ?? 0))} at once`} />
      <Stat
        label="Inputs waiting"
        value={count(sum(({ lane }) => lane?.queued_inputs ?? 0))}
        note={`${plural(sum(({ lane }) => lane?.queued_tokens ?? 0), "token")}`}
      />
    </div>
  );
}
