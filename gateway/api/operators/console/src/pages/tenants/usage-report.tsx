// Usage of days by model and key, on the screen and as a CSV file.
import { useState } from "preact/hooks";
import { Download } from "lucide";
import { get, send, withQuery } from "../../lib/api.ts";
import { saveFile } from "../../lib/csv.ts";
import { money, utcDay } from "../../lib/format.ts";
import { useAction, useLoad } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { TextField } from "../../ui/field.tsx";
import { Failure, Problem } from "../../ui/states.tsx";
import { type Column, Table } from "../../ui/table.tsx";

interface UsageRow {
  day: string;
  tenant: string;
  key?: string;
  model: string;
  requests: number;
  inputs: number;
  images: number;
  tokens: number;
  cost: number;
}

const WEEK_MS = 6 * 86_400_000;

function columnsOf(currency: string | null, tenant?: string): Column<UsageRow>[] {
  const columns: Column<UsageRow>[] = [
    { id: "day", title: "Day", value: (row) => row.day },
    ...(tenant === undefined ? [{ id: "tenant", title: "Tenant", value: (row: UsageRow) => row.tenant }] : []),
    { id: "key", title: "Key", value: (row) => row.key || null },
    { id: "model", title: "Model", value: (row) => row.model },
    { id: "requests", title: "Calls", kind: "number", value: (row) => row.requests },
    { id: "inputs", title: "Inputs", kind: "number", value: (row) => row.inputs },
    { id: "tokens", title: "Tokens", kind: "number", value: (row) => row.tokens },
  ];
  if (currency) {
    columns.push({ id: "cost", title: `Cost (${currency})`, kind: "number", value: (row) => row.cost, show: (row) => money(row.cost) });
  }
  return columns;
}

// tenant: only this one.
export function UsageReport({ tenant, onClose }: { tenant?: string; onClose: () => void }) {
  const [since, setSince] = useState(utcDay(new Date(Date.now() - WEEK_MS)));
  const [until, setUntil] = useState(utcDay(new Date()));
  const [typed, setTyped] = useState("");
  const query = { since, until, by: "key", tenant: tenant ?? typed.trim() };
  const address = withQuery("/admin/usage", query);
  const { content, problem } = useLoad(() => get<{ data: UsageRow[]; currency: string | null }>(address, 30_000), null, address);
  const download = useAction(async () => {
    const { content: table } = await send<string>(withQuery("/admin/usage", { ...query, form: "csv" }), { as: "text" });
    saveFile(table, "text/csv", `usage-${since}-${until}.csv`);
  });
  return (
    <Dialog
      title={tenant === undefined ? "Usage report" : `Usage of ${tenant}`}
      note="By day, model and key. Days are in UTC."
      isPanel
      id="usage-report"
      onClose={onClose}
      actions={
        <Button kind="primary" icon={Download} busy={download.busy} onClick={() => void download.run()}>
          Download as CSV
        </Button>
      }
    >
      <div class="fields">
        <TextField label="From the day (UTC)" type="date" value={since} onInput={setSince} />
        <TextField label="Until the day (UTC)" type="date" value={until} onInput={setUntil} />
        {tenant === undefined && <TextField label="Only the tenant" value={typed} onInput={setTyped} hint="Its whole name. Empty: all." />}
      </div>
      <Failure problem={problem} />
      <Problem>{download.problem?.message}</Problem>
      {!problem && (
        <Table
          id="usage"
          label="Usage"
          columns={columnsOf(content?.currency ?? null, tenant)}
          rows={content?.data ?? null}
          rowKey={(row) => [row.day, row.tenant, row.key, row.model].join("\n")}
          empty={{ title: "No usage on these days" }}
        />
      )}
    </Dialog>
  );
}
