// Limits as the configuration names them: <unit>_per_<window>, or requests_in_flight.
export const UNITS = ["requests", "tokens", "inputs", "images", "budget", "batch_tokens"];
export const WINDOWS = ["second", "minute", "hour", "day", "month"];
export const IN_FLIGHT = "requests_in_flight";
// What end users cannot have: slots of calls, and lines of batches.
export const USER_UNITS = ["requests", "tokens", "inputs", "images", "budget"];

// Budgets have a day or a month only.
export const windowsOf = (unit: string) => (unit === "budget" ? ["day", "month"] : WINDOWS);

export interface LimitRow {
  amount: string;
  unit: string;
  // "" for requests in flight.
  window: string;
}

export function rowsOf(limits: Record<string, number>): LimitRow[] {
  return Object.entries(limits).map(([name, amount]) => {
    if (name === IN_FLIGHT) return { amount: String(amount), unit: IN_FLIGHT, window: "" };
    const [unit = "", window = ""] = name.split("_per_");
    return { amount: String(amount), unit, window };
  });
}

export const nameOf = ({ unit, window }: LimitRow) => (unit === IN_FLIGHT ? IN_FLIGHT : `${unit}_per_${window}`);

export const TWICE = "This limit is listed twice.";

// 1,000, 0.5, 100k or 2M.
const AMOUNT = /^([0-9][0-9_,]*(?:\.[0-9]+)?) ?([kKM]?)$/;

// Why a row is not sent, or null.
export function rowProblem(row: LimitRow, rows: LimitRow[]): string | null {
  if (!AMOUNT.test(row.amount.trim()) || numberOf(row) <= 0) return "a number such as 1,000 or 100k";
  if (row.unit !== "budget" && !Number.isInteger(numberOf(row))) return "a whole number; only budgets have decimals";
  if (rows.some((other) => other !== row && nameOf(other) === nameOf(row))) return TWICE;
  return null;
}

// Rounded, for 1.1k is 1100.0000000000002 otherwise.
function numberOf({ amount }: LimitRow) {
  const [, number = "", unit = ""] = AMOUNT.exec(amount.trim()) ?? [];
  const value = Number(number.replaceAll(/[_,]/g, ""));
  return unit ? Number((value * (unit === "M" ? 1_000_000 : 1000)).toPrecision(12)) : value;
}

export const limitsOf = (rows: LimitRow[]): Record<string, number> =>
  Object.fromEntries(rows.map((row) => [nameOf(row), numberOf(row)]));

// A limit in words: 1,000 tokens per minute.
export function limitWords(name: string, amount: number, currency?: string | null) {
  const number = new Intl.NumberFormat("en").format(amount);
  if (name === IN_FLIGHT) return `${number} requests in flight`;
  const [unit = "", window = ""] = name.split("_per_");
  return unit === "budget"
    ? `${number} ${currency ?? ""} per ${window}`.replace("  ", " ")
    : `${number} ${unit.replaceAll("_", " ")} per ${window}`;
}

// The name of a limit in words: tokens per day. That of a model's or a key's use keeps its scope in front.
export const limitTitle = (name: string) => name.replace(/[a-z_]+$/, (own) => own.replaceAll("_", " "));

// All limits in words, separated by commas.
export const limitsWords = (limits: Record<string, number>, currency?: string | null) =>
  Object.entries(limits)
    .map(([name, amount]) => limitWords(name, amount, currency))
    .join(", ");
