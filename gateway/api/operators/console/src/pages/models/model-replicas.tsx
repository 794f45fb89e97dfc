// The replicas of a model's upstreams, with their health over time.
import { duration, milliseconds } from "../../lib/format.ts";
import type { Health } from "../../lib/health.ts";
import { href } from "../../lib/route.ts";
import type { Model, Replica } from "../../lib/types.ts";
import { Badge } from "../../ui/badge.tsx";
import { Clip } from "../../ui/clip.tsx";
import { HealthStrip } from "../../ui/health-strip.tsx";
import { Table } from "../../ui/table.tsx";

export interface ModelReplicasProps {
  model: Model;
  // Of all upstreams.
  replicas: Replica[];
  health: Health | null;
  span: string;
}

const now = () => Date.now() / 1000;

export function ModelReplicas({ model, replicas, health, span }: ModelReplicasProps) {
  const upstreams = new Set([model.upstream, ...model.upstreams.map(({ name }) => name)]);
  return (
    <Table
      label="Replicas of the model"
      id="replica"
      rows={replicas.filter(({ upstream }) => upstreams.has(upstream))}
      rowKey={({ upstream, name }) => `${upstream}\n${name}`}
      file="replicas"
      empty={{ title: "No replicas", children: "Its upstream has none yet." }}
      columns={[
        { id: "name", title: "Replica", value: ({ name }) => name, show: ({ name }) => <Clip class="mono" text={name} /> },
        {
          id: "upstream",
          title: "Upstream",
          value: ({ upstream }) => upstream,
          show: ({ upstream }) => (
            <a class="clip" href={href("upstreams", [upstream])} title={upstream} dir="auto">
              {upstream}
            </a>
          ),
        },
        {
          id: "state",
          title: "State",
          value: (replica) => (replica.is_drained ? "drained" : replica.state),
          show: (replica) => <Badge value={replica.is_drained ? "drained" : replica.state} />,
        },
        {
          id: "for",
          title: "For",
          value: ({ since_s }) => (since_s === null ? null : now() - since_s),
          kind: "number",
          show: ({ since_s }) => duration(since_s === null ? null : now() - since_s),
        },
        { id: "latency", title: "Latency", value: ({ latency_s }) => latency_s, kind: "number", show: ({ latency_s }) => milliseconds(latency_s) },
        { id: "reason", title: "Reason", value: ({ reason }) => reason, kind: "long" },
        ...(health
          ? [
              {
                id: "health",
                title: span,
                isSorted: false,
                show: ({ upstream, name }: Replica) => (
                  <HealthStrip name={name} spans={health.spansOf(upstream, name)} fromS={health.fromS} untilS={health.untilS} />
                ),
              },
            ]
          : []),
      ]}
    />
  );
}
