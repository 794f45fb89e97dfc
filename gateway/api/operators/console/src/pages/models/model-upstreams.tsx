// The upstreams of one model: members, a canary and a mirror.
import { href } from "../../lib/route.ts";
import type { Model } from "../../lib/types.ts";
import { Badge } from "../../ui/badge.tsx";
import { Table } from "../../ui/table.tsx";
import { memberColumns } from "./member-columns.tsx";

export function ModelUpstreams({ model }: { model: Model }) {
  const { name, upstream, upstreams, state } = model;
  if (upstreams.length) {
    return (
      <Table
        label="Upstreams of the model"
        id="upstream"
        rows={upstreams.map((each) => ({ model: name, ...each }))}
        rowKey={(row) => `${row.role}\n${row.name}`}
        columns={memberColumns()}
      />
    );
  }
  return (
    <Table
      label="Upstreams of the model"
      id="upstream"
      rows={[{ upstream, state }]}
      rowKey={(row) => row.upstream}
      columns={[
        {
          id: "upstream",
          title: "Upstream",
          value: (row) => row.upstream,
          kind: "long",
          show: () => (
            <a class="clip" href={href("upstreams", [upstream])} title={upstream} dir="auto">
              {upstream}
            </a>
          ),
        },
        { id: "state", title: "State", value: (row) => row.state, show: (row) => <Badge value={row.state} /> },
        { id: "share", title: "Share", value: () => "all calls" },
      ]}
    />
  );
}
