// Numbers and times as people read them.
type Maybe = number | null | undefined;

const integers = new Intl.NumberFormat("en");
const shortNumbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const plainNumbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const amounts = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const smallAmounts = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });
// Smaller amounts are shown as less than this one.
const SMALLEST = 0.000001;
const shares = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

export const NONE = "–";
const orNone = (format: (value: number) => string) => (value: Maybe) =>
  value === null || value === undefined || Number.isNaN(value) ? NONE : format(value);

export const count = orNone((value) => integers.format(value));
// A short number: 12.3K.
export const short = orNone((value) => shortNumbers.format(value));
export const percent = orNone((value) => shares.format(value));
export const money = (value: Maybe, currency?: string | null) =>
  orNone((amount) => {
    const isTiny = amount > 0 && amount < SMALLEST;
    const text = isTiny ? `< ${smallAmounts.format(SMALLEST)}` : (amount >= 1 ? amounts : smallAmounts).format(amount);
    return currency ? `${text} ${currency}` : text;
  })(value);
// A sum of many small prices, at two decimals.
export const spend = (value: Maybe, currency?: string | null) => {
  const isSmall = value !== null && value !== undefined && value > 0 && value < 0.01;
  return isSmall ? `< ${money(0.01, currency)}` : orNone((amount) => `${amounts.format(amount)}${currency ? ` ${currency}` : ""}`)(value);
};
export const milliseconds = orNone((seconds) => {
  const text = plainNumbers.format(seconds * 1000);
  return seconds * 1000 < 999.5 ? `${text} ms` : `${plainNumbers.format(seconds)} s`;
});
export const bytes = orNone((value) =>
  value >= 1e9
    ? `${plainNumbers.format(value / 1e9)} GB`
    : value >= 1e6
      ? `${plainNumbers.format(value / 1e6)} MB`
      : `${plainNumbers.format(value / 1e3)} KB`,
);

const ENDS = { day: 10, minute: 16, second: 19 };
// A moment in local time, the same on all pages: 2026-11-28 23:30.
export const moment = (atS: Maybe, upTo: keyof typeof ENDS = "minute") =>
  orNone((value) => {
    const at = new Date(value * 1000);
    if (Number.isNaN(at.getTime())) return NONE;
    const two = (number: number) => String(number).padStart(2, "0");
    const date = [String(at.getFullYear()).padStart(4, "0"), two(at.getMonth() + 1), two(at.getDate())].join("-");
    const time = [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":");
    return `${date} ${time}`.slice(0, ENDS[upTo]);
  })(atS);
export const duration = orNone((seconds) => {
  const total = Math.floor(seconds);
  if (total < 120) return `${total} s`;
  if (total < 7200) return `${Math.floor(total / 60)} min`;
  return total < 172_800 ? `${Math.floor(total / 3600)} h` : `${Math.floor(total / 86_400)} d`;
});
export const ago = orNone((atS) => {
  const seconds = Date.now() / 1000 - atS;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
});
// A day of UTC, as requests for the usage name it.
export const utcDay = (date: Date) => date.toISOString().slice(0, 10);

// The zone of the times, such as "GMT+1, Europe/Berlin".
export function zone(atS: number) {
  const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
  const parts = new Intl.DateTimeFormat("en", { timeZone, timeZoneName: "shortOffset" }).formatToParts(atS * 1000);
  const offset = parts.find((part) => part.type === "timeZoneName")?.value ?? "";
  return timeZone && timeZone !== "UTC" ? `${offset}, ${timeZone}` : "UTC";
}

export const plural = (number: number, one: string, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
// A name of the wire as words: quota_exceeded → quota exceeded.
export const words = (name: string) => name.replaceAll("_", " ");
