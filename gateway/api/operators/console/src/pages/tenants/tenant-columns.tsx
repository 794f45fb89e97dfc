// Columns of the list of tenants.
import { count, money, NONE, short, spend } from "../../lib/format.ts";
import { limitsWords, limitTitle } from "../../lib/limits.ts";
import { href } from "../../lib/route.ts";
import type { TenantRow } from "../../lib/tenants.ts";
import { Badge } from "../../ui/badge.tsx";
import { Clip } from "../../ui/clip.tsx";
import { LimitUse } from "./limit-use.tsx";
import type { Column } from "../../ui/table.tsx";

function Name({ row }: { row: TenantRow }) {
  return (
    <span class="tenant-name">
      <a href={href("tenants", [row.name])}>
        <Clip text={row.name} />
      </a>
      {row.in_file && (
        <span title="Defined in router.yaml">
          <Badge value="file" tone="quiet" />
        </span>
      )}
      {row.notes.length > 0 && <Badge value="note" tone="warn" label={row.notes.length === 1 ? "1 note" : `${row.notes.length} notes`} />}
    </span>
  );
}

export function tenantColumns(currency: string | null): Column<TenantRow>[] {
  const cost: Column<TenantRow> = {
    id: "month",
    title: `This month, ${currency}`,
    kind: "number",
    isSorted: false,
    value: (row) => row.month.cost,
    show: (row) => <span title={money(row.month.cost, currency)}>{row.month.cost ? spend(row.month.cost) : NONE}</span>,
  };
  return [
    { id: "name", title: "Tenant", kind: "long", value: (row) => row.name, show: (row) => <Name row={row} /> },
    { id: "calls", title: "Calls today", kind: "number", value: (row) => row.today.calls, show: (row) => count(row.today.calls) },
    {
      id: "refused",
      title: "Refused",
      kind: "number",
      value: (row) => row.today.refused,
      show: (row) => (row.today.refused ? <span class="warned">{count(row.today.refused)}</span> : NONE),
    },
    {
      id: "tokens",
      title: "Tokens today",
      kind: "number",
      value: (row) => row.today.tokens,
      show: (row) => <span title={count(row.today.tokens)}>{short(row.today.tokens)}</span>,
    },
    ...(currency ? [cost] : []),
    {
      id: "fullest",
      title: "Fullest limit",
      isSorted: false,
      value: (row) => (row.most_used ? `${limitTitle(row.most_used.limit)} ${row.most_used.share}` : null),
      show: (row) => (row.most_used ? <LimitUse use={row.most_used} currency={currency} isShort /> : <span class="note">no limit</span>),
    },
    { id: "keys", title: "Keys", kind: "number", value: (row) => row.keys, show: (row) => count(row.keys) },
    { id: "last_used", title: "Last used", kind: "number", value: (row) => row.last_used, show: (row) => row.last_used ?? NONE },
    { id: "limits", title: "Limits", kind: "hidden", value: (row) => limitsWords(row.limits, currency) },
    { id: "models", title: "Models", kind: "hidden", value: (row) => row.models?.join(" ") ?? "all" },
    { id: "source", title: "Source", kind: "hidden", value: (row) => (row.in_file ? "router.yaml" : "stored") },
  ];
}
