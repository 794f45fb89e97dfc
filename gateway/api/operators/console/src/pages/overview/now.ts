// The numbers of the last minute, in which a rate is steady, and their course over the last hour.
import { failureClass } from "../../lib/failures.ts";
import type { TrafficPoint } from "../../lib/traffic.ts";

const MINUTE_S = 65;
// Points of a sparkline: one a minute.
const GROUP = 6;

export interface Now {
  calls: number;
  tokens: number;
  p50: number | null;
  p95: number | null;
  p99: number | null;
  // Shares of the calls.
  failed: number | null;
  refused: number | null;
  mistaken: number | null;
  // Per second, the most frequent ones first; without refusals and mistakes of callers.
  kinds: [kind: string, perS: number][];
}

type Values = (number | null)[];

export interface Course {
  calls: Values;
  tokens: Values;
  p95: Values;
  failed: Values;
  inFlight: Values;
}

const sum = (points: TrafficPoint[], value: (point: TrafficPoint) => number) =>
  points.reduce((total, point) => total + value(point), 0);

const failuresOf = (points: TrafficPoint[], wanted: string) =>
  sum(points, ({ failures }) =>
    Object.entries(failures).reduce((total, [kind, calls]) => total + (failureClass(kind) === wanted ? calls : 0), 0),
  );

const newest = (points: TrafficPoint[], value: (point: TrafficPoint) => number | null) =>
  points.reduce<number | null>((found, point) => value(point) ?? found, null);

export function nowOf(points: TrafficPoint[]): Now | null {
  const last = points.at(-1);
  if (!last) return null;
  const recent = points.filter(({ at_s }) => at_s > last.at_s - MINUTE_S).slice(-GROUP);
  const seconds = sum(recent, (point) => point.seconds);
  const calls = sum(recent, (point) => point.calls);
  const share = (wanted: string) => (calls ? failuresOf(recent, wanted) / calls : null);
  const kinds = new Map<string, number>();
  for (const { failures } of recent) {
    for (const [kind, number] of Object.entries(failures)) {
      if (number > 0 && failureClass(kind) === "gateway") kinds.set(kind, (kinds.get(kind) ?? 0) + number / seconds);
    }
  }
  return {
    calls: calls / seconds,
    tokens: sum(recent, (point) => point.tokens) / seconds,
    p50: newest(recent, ({ p50_s }) => p50_s),
    p95: newest(recent, ({ p95_s }) => p95_s),
    p99: newest(recent, ({ p99_s }) => p99_s),
    failed: share("gateway"),
    refused: share("refused"),
    mistaken: share("caller"),
    kinds: [...kinds].sort(([, one], [, other]) => other - one),
  };
}

export function courseOf(points: TrafficPoint[]): Course {
  const groups: TrafficPoint[][] = [];
  for (let end = points.length; end > 0; end -= GROUP) groups.unshift(points.slice(Math.max(0, end - GROUP), end));
  const rate = (value: (point: TrafficPoint) => number) =>
    groups.map((group) => sum(group, value) / sum(group, (point) => point.seconds));
  return {
    calls: rate(({ calls }) => calls),
    tokens: rate(({ tokens }) => tokens),
    p95: groups.map((group) => newest(group, ({ p95_s }) => p95_s)),
    failed: groups.map((group) => failuresOf(group, "gateway")),
    inFlight: groups.map((group) => Math.max(...group.map(({ calls_in_flight }) => calls_in_flight))),
  };
}
