// All tenants, by page, with their usage and the limit that is used most.
import { useState } from "preact/hooks";
import { Building2, ChartColumn, Plus } from "lucide";
import { count } from "../../lib/format.ts";
import { useRemoteTable } from "../../lib/remote-table.ts";
import { go, href, setQuery, useParam } from "../../lib/route.ts";
import type { TenantPage, TenantRow } from "../../lib/tenants.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Page } from "../../ui/page.tsx";
import { Failure } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { tenantColumns } from "./tenant-columns.tsx";
import { NewTenant } from "./new-tenant.tsx";
import { UsageReport } from "./usage-report.tsx";

const SOURCES = [
  ["", "All sources"],
  ["store", "Stored"],
  ["file", "router.yaml"],
] as const;

function SourceChoice({ source }: { source: string }) {
  return (
    <select
      aria-label="Source of the tenants"
      value={source}
      onChange={(event) => setQuery({ source: event.currentTarget.value || null, page: null })}
    >
      {SOURCES.map(([value, title]) => (
        <option key={value} value={value} selected={value === source}>
          {title}
        </option>
      ))}
    </select>
  );
}

export function TenantList() {
  const { canChange } = useAccess();
  const [source] = useParam("source");
  const [opened, setOpened] = useState<"new" | "usage" | null>(null);
  const { page, rows, remote, problem } = useRemoteTable<TenantRow, TenantPage>("/admin/tenants", { sort: "name", query: { source } });
  const add = canChange && (
    <Button kind="primary" icon={Plus} onClick={() => setOpened("new")}>
      New tenant
    </Button>
  );
  return (
    <Page
      title="Tenants"
      note={page ? `${count(page.total)} ${page.total === 1 ? "party that is" : "parties that are"} limited and billed.` : "The parties that are limited and billed."}
      actions={
        <>
          <Button icon={ChartColumn} onClick={() => setOpened("usage")}>
            Usage report
          </Button>
          {add}
        </>
      }
    >
      <Card isFlush>
        <Failure problem={problem} id="tenants-problem" />
        {(rows || !problem) && (
          <Table
            label="Tenants"
            columns={tenantColumns(page?.currency ?? null)}
            rows={rows}
            remote={remote}
            rowKey={({ name }) => name}
            file="tenants"
            onOpen={({ name }) => go(href("tenants", [name]))}
            tools={<SourceChoice source={source} />}
            empty={{
              title: source ? "No tenant of this source" : "No tenants yet",
              children: "A tenant has limits, a share of the models, and the keys of its callers.",
              icon: Building2,
              action: source ? <Button onClick={() => setQuery({ source: null })}>Show all sources</Button> : add,
            }}
          />
        )}
      </Card>
      {opened === "new" && <NewTenant onClose={() => setOpened(null)} />}
      {opened === "usage" && <UsageReport onClose={() => setOpened(null)} />}
    </Page>
  );
}
