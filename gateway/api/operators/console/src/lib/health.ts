// The states that replicas had in a span of time, from /admin/history/replicas.
import { get, withQuery } from "./api.ts";
import { useLoad } from "./load.ts";
import type { Range } from "./range.ts";

const REFRESH_INTERVAL_MS = 15_000;

export interface HealthSpan {
  from_s: number;
  // Null while it lasts.
  until_s: number | null;
  state: string;
  reason: string;
}

interface Reply {
  from_s: number;
  until_s: number;
  data: { upstream: string; replica: string; spans: HealthSpan[] }[];
}

export interface Health {
  fromS: number;
  untilS: number;
  // Undefined for a replica that is not known there.
  spansOf: (upstream: string, replica: string) => HealthSpan[] | undefined;
}

const keyOf = (upstream: string, replica: string) => `${upstream}\n${replica}`;

// Null until it is read, and where the gateway keeps no history.
export function useHealth(range: Range, upstream?: string): Health | null {
  const path = withQuery("/admin/history/replicas", { ...range.query, upstream });
  const { content, atS } = useLoad(() => get<Reply>(path), range.refreshMs && REFRESH_INTERVAL_MS, path);
  if (!content) return null;
  const spans = new Map(content.data.map((row) => [keyOf(row.upstream, row.replica), row.spans]));
  const untilS = range.untilS ?? atS ?? content.until_s;
  return {
    fromS: range.fromS ?? untilS - range.seconds,
    untilS,
    spansOf: (name, replica) => spans.get(keyOf(name, replica)),
  };
}
