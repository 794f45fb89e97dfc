// Usage of this month by model.
import { money } from "../../lib/format.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Card } from "../../ui/card.tsx";
import { type Column, Table } from "../../ui/table.tsx";

type Row = Summary["by_model"][number];

export function ModelUsage({ tenant }: { tenant: Summary }) {
  const { by_model, currency } = tenant;
  const columns: Column<Row>[] = [
    { id: "model", title: "Model", kind: "long", value: (row) => row.model },
    { id: "calls", title: "Calls", kind: "number", value: (row) => row.calls },
    { id: "tokens", title: "Tokens", kind: "number", value: (row) => row.tokens },
  ];
  if (currency) {
    columns.push({ id: "cost", title: `Cost (${currency})`, kind: "number", value: (row) => row.cost, show: (row) => money(row.cost) });
  }
  return (
    <Card title="Models this month" note="Settled usage, in UTC." id="by-model" isFlush>
      <Table
        id="models"
        label="Usage by model"
        sort="-tokens"
        columns={columns}
        rows={by_model}
        rowKey={({ model }) => model}
        empty={{ title: "No usage this month", children: "The first call of one of its keys is counted here." }}
      />
    </Card>
  );
}
