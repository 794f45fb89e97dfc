// The models that an upstream serves, with its part in each.
import { href } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Table } from "../../ui/table.tsx";
import type { UpstreamRow } from "./rows.ts";

export function UpstreamModels({ row }: { row: UpstreamRow }) {
  const roleOf = (name: string) =>
    row.models.find((model) => model.name === name)?.upstreams.find((upstream) => upstream.name === row.name)?.role ?? "member";
  return (
    <Table
      label="Models"
      id="model"
      rows={row.models}
      rowKey={({ name }) => name}
      empty={{ title: "No model uses it", children: "Give it a name for callers on the page Models." }}
      columns={[
        {
          id: "name",
          title: "Model",
          value: ({ name }) => name,
          kind: "long",
          show: ({ name }) => (
            <a class="clip" href={href("models", [name])} title={name} dir="auto">
              {name}
            </a>
          ),
        },
        { id: "role", title: "Role", value: ({ name }) => roleOf(name) },
        { id: "state", title: "State", value: ({ state }) => state, show: ({ state }) => <Badge value={state} /> },
      ]}
    />
  );
}
