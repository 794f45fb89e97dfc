// Models as the list shows them: the status of each, what operators added, and the calls of the last day.
import type { Addition, Additions } from "../../lib/additions.ts";
import { get } from "../../lib/api.ts";
import type { Top, TopRow } from "../../lib/history.ts";
import { useLoad } from "../../lib/load.ts";
import type { Model } from "../../lib/types.ts";

const REFRESH_INTERVAL_MS = 60_000;
const TOP = "/admin/history/top?range=24h&by=model&metric=calls&limit=100";

export interface ModelRow {
  name: string;
  // Null for an addition that is not applied.
  model: Model | null;
  addition: Addition | undefined;
  // Undefined for a model without calls, and where no history is kept.
  calls: TopRow | undefined;
  // not_applied for an addition that is not in use.
  state: string;
}

// Null until it is read, and where the gateway keeps no history.
export function useModelCalls(): Map<string, TopRow> | null {
  const { content } = useLoad(() => get<Top>(TOP), REFRESH_INTERVAL_MS);
  return content && new Map(content.data.map((row) => [row.name, row]));
}

export function modelRows(models: Model[], additions: Additions, calls: Map<string, TopRow> | null): ModelRow[] {
  const known = new Set(models.map(({ name }) => name));
  const added = new Map((additions.content ?? []).map((addition) => [addition.name, addition]));
  return [
    ...models.map((model) => ({
      name: model.name,
      model,
      addition: added.get(model.name),
      calls: calls?.get(model.name),
      state: model.state,
    })),
    ...[...added.values()]
      .filter(({ name }) => !known.has(name))
      .map((addition) => ({ name: addition.name, model: null, addition, calls: undefined, state: "not_applied" })),
  ];
}

// All upstreams, those that are no member with their role.
export const upstreamsText = (model: Model) =>
  model.upstreams.map(({ name, role }) => (role === "member" ? name : `${name} (${role})`)).join(", ") || model.upstream;

export const notesOf = (model: Model) => [...model.notes, ...(model.cache && model.cache !== "on" ? [`cache: ${model.cache}`] : [])];
