// What the holder of a key sees: own limits and own usage.
import { useState } from "preact/hooks";
import { send } from "../api.js";
import { count, day, isBudget, money, NONE } from "../format.js";
import { useOnce } from "../hooks.js";
import { Failure, Note, Table, TextField } from "../parts.jsx";

const WEEK_MS = 6 * 86400000;

// currency: null while no model of the gateway has a price.
export function UsageTable({ rows, id, currency }) {
  const hasKeys = rows.some((row) => row.key !== undefined);
  const columns = [["day"], ["tenant", "text"], ...(hasKeys ? [["key"]] : []), ["model", "text"]];
  const numbers = ["requests", "inputs", "images", "tokens"];
  return (
    <Table
      id={id}
      label="Usage"
      empty="No usage on these days."
      columns={[
        ...columns,
        ...numbers.map((name) => [name, "number"]),
        ...(currency ? [[`cost (${currency})`, "number"]] : []),
      ]}
      rows={rows.map((row) => [
        row.day,
        row.tenant,
        ...(hasKeys ? [row.key || NONE] : []),
        row.model,
        ...numbers.map((name) => count(row[name])),
        ...(currency ? [money(row.cost)] : []),
      ])}
    />
  );
}

export function Days({ since, until, setSince, setUntil, prefix }) {
  return (
    <>
      <TextField label="From the day (UTC)" id={`${prefix}-since`} type="date" value={since} onInput={setSince} />
      <TextField label="Until the day (UTC)" id={`${prefix}-until`} type="date" value={until} onInput={setUntil} />
    </>
  );
}

export function useDays() {
  const [since, setSince] = useState(day(new Date(Date.now() - WEEK_MS)));
  const [until, setUntil] = useState(day(new Date()));
  return { since, until, setSince, setUntil };
}

export function Own({ turn }) {
  const days = useDays();
  const address = `/usage?since=${days.since}&until=${days.until}&by=key`;
  const { content, problem } = useOnce(async () => (await send(address)).content, `${turn} ${address}`);
  const inCurrency = (amount) => `${money(amount)} ${content.currency ?? ""}`;
  const limits = content
    ? [
        ...Object.entries(content.limits),
        ...Object.values(content.model_limits).flatMap((of) => Object.entries(of)),
      ]
    : [];
  return (
    <>
      <Failure problem={problem} />
      {content && (
        <>
          <Note id="own-key">
            Tenant {content.tenant} · key {content.key} · may {content.scopes.join(", ") || "do nothing"} ·{" "}
            {content.models ? `models ${content.models.join(", ")}` : "all models"}
            {content.expires_s ? ` · expires ${new Date(content.expires_s * 1000).toISOString()}` : ""}
          </Note>
          <h3>Limits</h3>
          <Table
            id="own-limits"
            label="Limits"
            empty="No limits."
            columns={[["limit"], ["amount", "number"], ["left", "number"]]}
            rows={limits.map(([name, amount]) => [
              name,
              isBudget(name) ? inCurrency(amount) : count(amount),
              name in content.remaining ? inCurrency(content.remaining[name]) : NONE,
            ])}
          />
          <h3>Usage</h3>
          <form class="row" onSubmit={(event) => event.preventDefault()}>
            <Days {...days} prefix="own" />
          </form>
          <UsageTable rows={content.data} id="own-usage" currency={content.currency} />
        </>
      )}
    </>
  );
}
