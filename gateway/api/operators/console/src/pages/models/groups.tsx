// Models with several upstreams, a canary or a mirror: how each of them stands.
import { href } from "../../lib/route.ts";
import type { Model } from "../../lib/types.ts";
import { Card } from "../../ui/card.tsx";
import { memberColumns, type Member } from "./member-columns.tsx";
import { Table } from "../../ui/table.tsx";

export function Groups({ models }: { models: Model[] }) {
  const rows: Member[] = models.flatMap((model) => model.upstreams.map((upstream) => ({ model: model.name, ...upstream })));
  if (!rows.length) return null;
  return (
    <Card title="Models with several upstreams" isFlush id="model-upstreams">
      <Table
        label="Models with several upstreams"
        id="group"
        rows={rows}
        rowKey={({ model, name, role }) => `${model}\n${name}\n${role}`}
        file="model-upstreams"
        columns={[
          {
            id: "model",
            title: "Model",
            value: ({ model }) => model,
            show: ({ model }) => (
              <a class="clip" href={href("models", [model])} title={model} dir="auto">
                {model}
              </a>
            ),
          },
          ...memberColumns(),
        ]}
      />
    </Card>
  );
}
