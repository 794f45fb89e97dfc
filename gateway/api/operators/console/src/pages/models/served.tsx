// The models that callers can name, as a table.
import { useState } from "preact/hooks";
import { Pencil, Trash2 } from "lucide";
import type { Addition, Additions } from "../../lib/additions.ts";
import { bytes, count, milliseconds, money, NONE, plural, short } from "../../lib/format.ts";
import type { TopRow } from "../../lib/history.ts";
import type { Model, Snapshot } from "../../lib/types.ts";
import { useAccess } from "../../shell/access.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Sparkline } from "../../ui/sparkline.tsx";
import { Stat } from "../../ui/stat.tsx";
import { type Column, Table } from "../../ui/table.tsx";
import { Fingerprint } from "./fingerprint.tsx";
import { Groups } from "./groups.tsx";
import { NameCell } from "./name-cell.tsx";
import { RemoveName } from "./remove-name.tsx";
import { type ModelRow, modelRows, notesOf, upstreamsText, useModelCalls } from "./rows.ts";
import { Tags } from "./tags.tsx";

export interface ServedProps {
  snapshot: Snapshot;
  additions: Additions;
  onChange: (addition: Addition) => void;
  onAdd: () => void;
}

export function Served({ snapshot, additions, onChange, onAdd }: ServedProps) {
  const { canChange } = useAccess();
  const calls = useModelCalls();
  const [leaving, setLeaving] = useState<string | null>(null);
  const { currency } = snapshot;
  const rows = modelRows(snapshot.models, additions, calls);
  const has = (value: (row: ModelRow) => unknown) => rows.some((row) => value(row));
  const columns: (Column<ModelRow> | false)[] = [
    { id: "name", title: "Model", value: ({ name }) => name, show: (row) => <NameCell row={row} /> },
    { id: "state", title: "State", value: ({ state }) => state, show: ({ state }) => <Badge value={state} /> },
    { id: "upstreams", title: "Served by", value: servedBy, show: (row) => <ServedBy row={row} /> },
    { id: "backend", title: "Backend", value: ({ model }) => model?.backend ?? null, kind: "hidden" },
    { id: "operations", title: "Operations", value: ({ model }) => model?.operations.join(" ") ?? null, show: ({ model }) => <Tags names={model?.operations ?? []} /> },
    { id: "vectors", title: "Vectors", value: ({ model }) => model?.dimensions ?? null, show: ({ model }) => <Vectors model={model} /> },
    { id: "space", title: "Vector space", value: ({ model }) => model?.fingerprint ?? null, kind: "hidden" },
    { id: "memory", title: "Memory in bytes", value: ({ model }) => model?.memory_bytes ?? null, kind: "hidden" },
    has(({ model }) => model?.price_per_million_tokens) && {
      id: "price",
      title: `${currency ?? "Price"} per 1M tokens`,
      value: ({ model }) => model?.price_per_million_tokens ?? null,
      kind: "number",
      show: ({ model }) => money(model?.price_per_million_tokens),
    },
    has(({ model }) => model?.cache) && { id: "cache", title: "Cache", value: ({ model }) => model?.cache ?? null, show: ({ model }) => (model?.cache ? <Badge value={model.cache === "on" ? "on" : "off"} tone={model.cache === "on" ? "good" : "warn"} /> : NONE) },
    calls !== null && { id: "calls", title: "Calls, 24 h", value: (row) => row.calls?.calls ?? 0, kind: "number", show: (row) => <Calls calls={row.calls} /> },
    calls !== null && { id: "p95", title: "p95 in s", value: (row) => row.calls?.p95_s ?? null, kind: "hidden" },
    canChange && has(({ addition }) => addition) && {
      id: "actions",
      title: "",
      kind: "actions",
      show: ({ name, addition }) =>
        addition && (
          <>
            <Button isSmall kind="ghost" icon={Pencil} label={`Change ${name}`} onClick={() => onChange(addition)} />
            <Button isSmall kind="ghost" icon={Trash2} label={`Remove ${name}`} onClick={() => setLeaving(name)} />
          </>
        ),
    },
  ];
  return (
    <>
      <Figures snapshot={snapshot} calls={calls} />
      <Card isFlush id="models">
        <Table
          label="Models"
          columns={columns.filter((column) => column !== false)}
          rows={rows}
          rowKey={({ name }) => name}
          file="models"
          empty={{
            title: "No models yet",
            children: "Add an upstream first, or write `upstreams` and `models` into router.yaml.",
            action: canChange && additions.isOffered ? <Button onClick={onAdd}>New name</Button> : undefined,
          }}
        />
      </Card>
      <Groups models={snapshot.models} />
      {leaving !== null && <RemoveName name={leaving} onClose={() => setLeaving(null)} onRemoved={additions.reload} />}
    </>
  );
}

const servedBy = ({ model, addition }: ModelRow) => (model ? upstreamsText(model) : String(addition?.settings.upstream ?? ""));

const ServedBy = ({ row }: { row: ModelRow }) => (
  <div class="two-lines">
    <Clip text={servedBy(row) || NONE} />
    {row.model && <span class="note">{[row.model.backend, row.model.memory_bytes && bytes(row.model.memory_bytes)].filter(Boolean).join(", ")}</span>}
  </div>
);

const Vectors = ({ model }: { model: Model | null }) =>
  model?.dimensions ? (
    <div class="two-lines">
      <span class="one-line">{plural(model.dimensions, "number")}</span>
      <Fingerprint text={model.fingerprint} />
    </div>
  ) : (
    <>{NONE}</>
  );

const Calls = ({ calls }: { calls: TopRow | undefined }) => (
  <div class="two-lines">
    <span>{short(calls?.calls ?? 0)}</span>
    {calls && <Sparkline values={calls.points} />}
    {calls?.p95_s != null && <span class="note">{`p95 ${milliseconds(calls.p95_s)}`}</span>}
  </div>
);

function Figures({ snapshot, calls }: { snapshot: Snapshot; calls: Map<string, TopRow> | null }) {
  const ready = snapshot.models.filter(({ state }) => state === "ready").length;
  const all = snapshot.models.length;
  const spaces = new Set(snapshot.models.map(({ fingerprint }) => fingerprint).filter(Boolean)).size;
  const memory = new Map(snapshot.models.map(({ upstream, memory_bytes }) => [upstream, memory_bytes ?? 0]));
  const held = [...memory.values()].reduce((sum, value) => sum + value, 0);
  const total = calls && [...calls.values()].reduce((sum, row) => sum + row.calls, 0);
  const warned = snapshot.models.filter((model) => notesOf(model).length).length;
  return (
    <div class="stats">
      <Stat label="Ready" value={`${count(ready)} of ${count(all)}`} tone={ready === all ? "good" : ready ? "warn" : "bad"} note={warned ? `${count(warned)} with notes` : "names for callers"} />
      <Stat label="Vector spaces" value={count(spaces)} note="different fingerprints" />
      {held > 0 && <Stat label="Memory" value={bytes(held)} note="of models in this gateway's engine" />}
      {total !== null && <Stat label="Calls, 24 h" value={short(total)} note="all models" />}
    </div>
  );
}
