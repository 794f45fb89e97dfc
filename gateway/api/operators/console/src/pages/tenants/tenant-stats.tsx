// Usage of a tenant today and this month, with what is expected of the month.
import { count, short, spend } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Stat } from "../../ui/stat.tsx";

export function TenantStats({ tenant }: { tenant: Summary }) {
  const { name, today, month, currency } = tenant;
  const { forecast } = month;
  return (
    <div class="stats">
      <Stat label="Calls today" value={count(today.calls)} note="settled, in UTC" href={href("calls", [], { tenant: name })} id="calls-today" />
      <Stat
        label="Refused today"
        value={count(today.refused)}
        tone={today.refused ? "warn" : undefined}
        note={today.refused ? "by a limit" : "no limit was reached"}
      />
      <Stat label="Tokens today" value={short(today.tokens)} note={currency ? spend(today.cost, currency) : `${short(month.tokens)} this month`} />
      <Stat
        label={`This month${currency ? ` (${currency})` : ""}`}
        value={currency ? spend(month.cost) : `${short(month.tokens)} tokens`}
        note={`${short(month.tokens)} tokens, ${short(month.calls)} calls`}
      />
      <Stat
        label={`Expected this month${currency ? ` (${currency})` : ""}`}
        value={forecast ? (currency ? spend(forecast.cost) : `${short(forecast.tokens)} tokens`) : "–"}
        note={forecast ? `${short(forecast.tokens)} tokens, ${short(forecast.requests)} calls` : "after one full day"}
      />
    </div>
  );
}
