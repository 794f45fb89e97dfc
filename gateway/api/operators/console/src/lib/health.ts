// The states of replicas in a range, for strips.
import { type ReplicaSpan, useReplicaHistory } from "./history.ts";
import type { Range } from "./range.ts";

export interface Health {
  fromS: number;
  untilS: number;
  // Undefined for a replica that is not known there.
  spansOf: (upstream: string, replica: string) => ReplicaSpan[] | undefined;
}

const keyOf = (upstream: string, replica: string) => `${upstream}\n${replica}`;

// Null until it is read, and while it cannot be.
export function useHealth(range: Range, upstream?: string): Health | null {
  const { content, atS } = useReplicaHistory(range, upstream);
  if (!content) return null;
  const spans = new Map(content.data.map((row) => [keyOf(row.upstream, row.replica), row.spans]));
  const untilS = range.untilS ?? atS ?? content.until_s;
  return {
    fromS: range.fromS ?? untilS - range.seconds,
    untilS,
    spansOf: (name, replica) => spans.get(keyOf(name, replica)),
  };
}
