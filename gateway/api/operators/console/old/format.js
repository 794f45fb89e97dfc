// Numbers and times as people read them.
const integers = new Intl.NumberFormat("en");
const shortNumbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const plainNumbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const amounts = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 9 });

export const NONE = "–";
export const money = (value) => (value === null || value === undefined ? NONE : amounts.format(value));
// Limits of this kind are amounts of money.
export const isBudget = (name) => /budget_per_/.test(name);
export const count = (value) => (value === null || value === undefined ? NONE : integers.format(value));
export const rate = (value) => (value === null || value === undefined ? NONE : shortNumbers.format(value));
export const milliseconds = (seconds) => {
  if (seconds === null || seconds === undefined) return NONE;
  const inMilliseconds = plainNumbers.format(seconds * 1000);
  return seconds * 1000 < 999.5 ? `${inMilliseconds} ms` : `${plainNumbers.format(seconds)} s`;
};
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
// The zone of the times, such as "GMT+1, Europe/Berlin".
export function zone(seconds) {
  const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
  const parts = new Intl.DateTimeFormat("en", { timeZone, timeZoneName: "shortOffset" }).formatToParts(seconds * 1000);
  const offset = parts.find((part) => part.type === "timeZoneName")?.value ?? "";
  return timeZone && timeZone !== "UTC" ? `${offset}, ${timeZone}` : "UTC";
}
export const bytes = (value) =>
  value >= 1e9 ? `${plainNumbers.format(value / 1e9)} GB` : `${plainNumbers.format(value / 1e6)} MB`;
export const day = (date) => date.toISOString().slice(0, 10);
export const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
export const shortened = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);

export function duration(seconds) {
  const total = Math.floor(seconds);
  if (total < 120) return `${total} s`;
  if (total < 7200) return `${Math.floor(total / 60)} min`;
  return total < 172800 ? `${Math.floor(total / 3600)} h` : `${Math.floor(total / 86400)} d`;
}
