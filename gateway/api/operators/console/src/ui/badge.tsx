// A state or a kind in a word, with the color of its class. The word says all: the color repeats it.
import { words } from "../lib/format.ts";

export type Tone = "good" | "warn" | "bad" | "info" | "quiet";

const TONES: Record<string, Tone> = {};
const GOOD = "up ready running downloaded verified ok fits serving completed active answers success installed";
const WARN = "drained probation degraded canary_only stale absent cancelling slow expiring overloaded starting finalizing";
const BAD = "down refused unavailable failed differs withdrawn expired revoked undefined silent not_ready error foreign";
const INFO = "in_progress validating pulling loading joining checking downloading stopping";
for (const [tone, names] of [["good", GOOD], ["warn", WARN], ["bad", BAD], ["info", INFO]] as const) {
  for (const name of names.split(" ")) TONES[name] = tone;
}

export const toneOf = (state: string): Tone => TONES[state] ?? "quiet";

// The class of a status of HTTP.
export const toneOfStatus = (status: number): Tone =>
  status < 400 ? "good" : status === 429 || status === 499 ? "warn" : "bad";

export function Badge({ value, tone = toneOf(value), label }: { value: string; tone?: Tone; label?: string }) {
  return <span class={`badge tone-${tone}`}>{label ?? words(value)}</span>;
}
