// The cost of today and of the month, with a forecast. The records of usage are exact, but have to be added up tenant
// by tenant: with thousands of tenants the history of all calls takes their place.
import { get } from "../../lib/api.ts";
import type { History } from "../../lib/history.ts";
import { useLoad } from "../../lib/load.ts";

const TODAY_INTERVAL_MS = 60_000;
const MONTH_INTERVAL_MS = 600_000;
const TIMEOUT_MS = 30_000;
const DAY_S = 86_400;
const FORECAST_DAYS = 7;
const TENANTS_MAX = 1000;

interface MonthUsage {
  total: { cost: number; forecast: { cost: number } | null };
}

interface Month {
  cost: number;
  // Null before there was a whole day.
  forecast: number | null;
}

export interface Spend {
  today: number | null;
  // By interval of today.
  course: (number | null)[];
  month: Month | null;
  // The month cannot be read now.
  isMonthAway: boolean;
}

// Cost between two moments; null where nothing was counted.
function costBetween({ points }: History, fromS: number, untilS: number): number | null {
  const known = points.filter(({ at_s, cost }) => cost !== null && at_s >= fromS && at_s < untilS);
  return known.length ? known.reduce((sum, { cost }) => sum + (cost ?? 0), 0) : null;
}

// As the records of usage forecast: the rest of the month costs as much a day as the last days did.
export function monthOf(history: History, firstS: number, endS: number, nowS: number): Month {
  const todayS = Math.floor(nowS / DAY_S) * DAY_S;
  const cost = costBetween(history, firstS, nowS) ?? 0;
  const days = Array.from({ length: FORECAST_DAYS }, (_, index) => todayS - (index + 1) * DAY_S).map((startS) =>
    costBetween(history, startS, startS + DAY_S),
  );
  const first = days.findLastIndex((day) => day !== null);
  if (first < 0) return { cost, forecast: null };
  const perDay = days.reduce<number>((sum, day) => sum + (day ?? 0), 0) / (first + 1);
  return { cost, forecast: cost + (perDay * (endS - nowS)) / DAY_S };
}

async function readMonth(midnightS: number, isExact: boolean): Promise<Month> {
  const today = new Date(midnightS * 1000);
  const [firstS, endS] = [0, 1].map((more) => Date.UTC(today.getUTCFullYear(), today.getUTCMonth() + more) / 1000);
  if (isExact) {
    const { total } = await get<MonthUsage>(`/admin/usage?month=${today.toISOString().slice(0, 7)}`, TIMEOUT_MS);
    return { cost: total.cost, forecast: total.forecast?.cost ?? null };
  }
  const fromS = Math.min(firstS!, midnightS - FORECAST_DAYS * DAY_S);
  return monthOf(await get<History>(`/admin/history?from=${fromS}`, TIMEOUT_MS), firstS!, endS!, Date.now() / 1000);
}

// tenants: number of stored ones.
export function useSpend(tenants: number): Spend {
  // Days of usage are those of UTC.
  const midnightS = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
  const isExact = tenants <= TENANTS_MAX;
  const day = useLoad(
    () => get<History>(`/admin/history?from=${midnightS}`, TIMEOUT_MS),
    TODAY_INTERVAL_MS,
    String(midnightS),
  ).content;
  const month = useLoad(() => readMonth(midnightS, isExact), MONTH_INTERVAL_MS, `${midnightS} ${isExact}`);
  return {
    today: day && (costBetween(day, midnightS, midnightS + DAY_S) ?? 0),
    course: day?.points.map(({ cost }) => cost) ?? [],
    month: month.content,
    isMonthAway: month.problem !== null,
  };
}
