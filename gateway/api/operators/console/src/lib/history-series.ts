// Lines of charts from a history: sums of intervals become rates, in the unit of time in which they read well.
import type { History, HistoryPoint } from "./history.ts";

export interface TimeUnit {
  name: string;
  seconds: number;
}

export const SECOND: TimeUnit = { name: "second", seconds: 1 };
export const MINUTE: TimeUnit = { name: "minute", seconds: 60 };
export const HOUR: TimeUnit = { name: "hour", seconds: 3600 };
export const DAY: TimeUnit = { name: "day", seconds: 86_400 };
const UNITS = [SECOND, MINUTE, HOUR, DAY];

type Values = (number | null)[];

// The ends of the intervals. The last interval ends now if it is not over.
export function timesOf({ points, step_s }: History, nowS = Date.now() / 1000) {
  return points.map(({ at_s }) => Math.max(at_s + 1, Math.min(at_s + step_s, nowS)));
}

// Sums per second. The last interval, if it is not over, counts for the time that it has lasted.
export function ratesOf(history: History, value: (point: HistoryPoint) => number | null, nowS = Date.now() / 1000): Values {
  const ends = timesOf(history, nowS);
  return history.points.map((point, index) => {
    const sum = value(point);
    return sum === null ? null : sum / (ends[index]! - point.at_s);
  });
}

export const most = (values: Values) => values.reduce<number>((found, value) => Math.max(found, value ?? 0), 0);

// The shortest unit in which the greatest of some rates per second is at least `least`, else the longest.
export function unitFor(rates: Values, units = UNITS, least = 1): TimeUnit {
  const peak = most(rates);
  if (!peak) return units[0]!;
  return units.find(({ seconds }) => peak * seconds >= least) ?? units.at(-1)!;
}

export const inUnit = (rates: Values, { seconds }: TimeUnit): Values =>
  rates.map((rate) => (rate === null ? null : rate * seconds));

export const totalOf = ({ points }: History, value: (point: HistoryPoint) => number | null) =>
  points.reduce((sum, point) => sum + (value(point) ?? 0), 0);

export const okOf = ({ calls, failed }: HistoryPoint) => (calls === null ? null : calls - (failed ?? 0));
// Failures that no limit caused.
export const brokenOf = ({ failed, refused }: HistoryPoint) => (failed === null ? null : failed - (refused ?? 0));

// The kinds of failures, the most frequent ones first.
export function failureKinds({ points }: History): [kind: string, calls: number][] {
  const sums = new Map<string, number>();
  for (const { failures } of points) {
    for (const [kind, calls] of Object.entries(failures ?? {})) sums.set(kind, (sums.get(kind) ?? 0) + calls);
  }
  return [...sums].filter(([, calls]) => calls > 0).sort(([, one], [, other]) => other - one);
}
