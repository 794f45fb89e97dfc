// From the states of a replica to the segments of a strip.
import type { ReplicaSpan } from "../lib/history.ts";

// More are drawn as slots of equal length, each with its worst state.
const SEGMENTS_MAX = 240;
// The last one is the worst.
const ORDER = ["up", "drained", "joining", "probation", "gone", "refused", "down"];

export interface Segment {
  state: string;
  reason: string;
  fromS: number;
  untilS: number;
  // States that it stands for.
  count: number;
}

export const healthTone = (state: string) =>
  ({ up: "up", probation: "probation", joining: "probation", drained: "drained" })[state] ?? "down";

const worst = (one: Segment, other: Segment) => (ORDER.indexOf(one.state) >= ORDER.indexOf(other.state) ? one : other);

function slotsOf(segments: Segment[], fromS: number, untilS: number): Segment[] {
  const stepS = (untilS - fromS) / SEGMENTS_MAX;
  const slots = new Map<number, Segment>();
  for (const segment of segments) {
    const last = Math.min(SEGMENTS_MAX - 1, Math.ceil((segment.untilS - fromS) / stepS) - 1);
    for (let slot = Math.floor((segment.fromS - fromS) / stepS); slot <= last; slot += 1) {
      const own = { ...segment, fromS: fromS + slot * stepS, untilS: fromS + (slot + 1) * stepS };
      const before = slots.get(slot);
      slots.set(slot, before ? { ...worst(before, own), count: before.count + 1 } : own);
    }
  }
  return [...slots.entries()].sort(([one], [other]) => one - other).map(([, slot]) => slot);
}

export function healthSegments(spans: ReplicaSpan[], fromS: number, untilS: number): Segment[] {
  const segments = spans
    .map(({ from_s, until_s, state, reason }) => ({
      state,
      reason,
      fromS: Math.max(fromS, from_s),
      untilS: Math.min(untilS, until_s ?? untilS),
      count: 1,
    }))
    .filter((segment) => segment.untilS > segment.fromS);
  return segments.length > SEGMENTS_MAX ? slotsOf(segments, fromS, untilS) : segments;
}
