// The newest calls: read every two seconds while the table is live, and shown unchanged while it is held.
import { useRef } from "preact/hooks";
import { get, withQuery } from "../../lib/api.ts";
import { type Loaded, useLoad } from "../../lib/load.ts";
import { useRoute } from "../../lib/route.ts";
import { type Call, type CallList, isOfModel } from "./call.ts";

const REFRESH_INTERVAL_MS = 2000;
// All gateways are asked, and may take 5 s.
const FLEET_TIMEOUT_MS = 15_000;

export interface LiveCalls extends Omit<Loaded<CallList>, "atS"> {
  calls: Call[] | null;
  // Calls that ended since the table was held.
  newer: number;
  isFleet: boolean;
}

export const readCalls = (query: Record<string, string | boolean | null>, isFleet: boolean) =>
  get<CallList>(withQuery("/admin/calls", { ...query, fleet: isFleet || null }), isFleet ? FLEET_TIMEOUT_MS : undefined);

// isLive: read again and again; all gateways are asked only once. isHeld: what is shown does not change.
export function useCalls(isLive: boolean, isHeld: boolean): LiveCalls {
  const { query } = useRoute();
  const wanted = Object.fromEntries(
    ["tenant", "key", "model", "failed", "request_id"].map((name) => [name, query.get(name)]),
  );
  const isFleet = query.get("fleet") === "true";
  const subject = JSON.stringify([wanted, isFleet]);
  const loaded = useLoad(() => readCalls(wanted, isFleet), isFleet || !isLive ? null : REFRESH_INTERVAL_MS, subject);
  const held = useRef<{ subject: string; list: CallList | null }>({ subject: "", list: null });
  const isKept = isHeld && held.current.subject === subject && held.current.list !== null;
  if (!isKept) held.current = { subject, list: loaded.content };
  // Who asks for an id wants that request, whatever it is.
  const isListed = (call: Call) => query.has("all") || query.has("request_id") || isOfModel(call);
  const calls = held.current.list?.calls.filter(isListed) ?? null;
  const newestS = calls?.[0]?.at_s ?? 0;
  const newer = isKept ? (loaded.content?.calls.filter((call) => call.at_s > newestS && isListed(call)).length ?? 0) : 0;
  return { ...loaded, calls, newer, isFleet };
}
