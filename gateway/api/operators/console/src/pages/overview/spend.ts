// The cost of today, by the history, and that of the month with its forecast, by the records of usage.
import { get } from "../../lib/api.ts";
import type { History } from "../../lib/history.ts";
import { totalOf } from "../../lib/history-series.ts";
import { useLoad } from "../../lib/load.ts";

const TODAY_INTERVAL_MS = 60_000;
// The usage of every tenant is added up for it.
const MONTH_INTERVAL_MS = 600_000;
const TIMEOUT_MS = 30_000;
const DAY_S = 86_400;

interface MonthUsage {
  total: { cost: number; forecast: { cost: number } | null };
  currency: string | null;
}

export interface Spend {
  today: number | null;
  course: (number | null)[];
  month: number | null;
  forecast: number | null;
}

export function useSpend(): Spend {
  // Days of usage are those of UTC.
  const midnightS = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
  const month = new Date(midnightS * 1000).toISOString().slice(0, 7);
  const day = useLoad(
    () => get<History>(`/admin/history?from=${midnightS}`, TIMEOUT_MS),
    TODAY_INTERVAL_MS,
    String(midnightS),
  ).content;
  const usage = useLoad(() => get<MonthUsage>(`/admin/usage?month=${month}`, TIMEOUT_MS), MONTH_INTERVAL_MS, month).content;
  return {
    today: day && totalOf(day, ({ cost }) => cost),
    course: day?.points.map(({ cost }) => cost) ?? [],
    month: usage?.total.cost ?? null,
    forecast: usage?.total.forecast?.cost ?? null,
  };
}
