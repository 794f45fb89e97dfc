// The span of time that charts show, in the address: range=24h, or from= and until= in seconds after a zoom.
import { setQuery, useRoute } from "./route.ts";

export const RANGES = ["15m", "1h", "6h", "24h", "7d", "30d", "90d"] as const;
const SECONDS: Record<string, number> = {
  "15m": 900,
  "1h": 3600,
  "6h": 21_600,
  "24h": 86_400,
  "7d": 604_800,
  "30d": 2_592_000,
  "90d": 7_776_000,
};

export interface Range {
  // "" after a zoom.
  name: string;
  fromS: number | null;
  untilS: number | null;
  seconds: number;
  // Parameters of requests: range=24h, or from and until.
  query: Record<string, string | number>;
  // How often charts of this range are read again; null for a zoom, which does not move.
  refreshMs: number | null;
  choose: (name: string) => void;
  zoom: (fromS: number, untilS: number) => void;
}

// As the gateway bounds them: later ones are no seconds, and no date either.
const MOMENT_MAX_S = 253_402_300_800;

// A zoom in an address; null if it has none, or one that the gateway would refuse.
export function zoomOf(query: URLSearchParams): [fromS: number, untilS: number] | null {
  const [from, until] = [Number(query.get("from")), Number(query.get("until"))];
  return from > 0 && until > from && until < MOMENT_MAX_S ? [from, until] : null;
}

export function useRange(fallback = "1h"): Range {
  const { query } = useRoute();
  const zoomed = zoomOf(query);
  const choose = (name: string) => setQuery({ range: name === fallback ? null : name, from: null, until: null });
  const zoom = (fromS: number, untilS: number) =>
    setQuery({ range: null, from: Math.floor(fromS), until: Math.ceil(untilS) });
  if (zoomed) {
    const [from, until] = zoomed;
    const seconds = until - from;
    return { name: "", fromS: from, untilS: until, seconds, query: { from, until }, refreshMs: null, choose, zoom };
  }
  const written = query.get("range") ?? fallback;
  const name = Object.hasOwn(SECONDS, written) ? written : fallback;
  const seconds = SECONDS[name]!;
  const refreshMs = seconds <= 3600 ? 10_000 : 60_000;
  return { name, fromS: null, untilS: null, seconds, query: { range: name }, refreshMs, choose, zoom };
}
