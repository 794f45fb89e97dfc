// The snapshot of /admin/status, which the shell reads every two seconds for every page that shows it.
import { createContext } from "preact";
import { useContext, useRef } from "preact/hooks";
import { get, type RequestError } from "./api.ts";
import { useLoad } from "./load.ts";
import { type Rates, ratesBetween } from "./rates.ts";
import type { Snapshot } from "./types.ts";

const REFRESH_INTERVAL_MS = 2000;

export interface Status {
  // Null until it is read. It stays while the gateway does not answer.
  snapshot: Snapshot | null;
  rates: Rates | null;
  problem: RequestError | null;
  atS: number | null;
}

export const StatusContext = createContext<Status>({ snapshot: null, rates: null, problem: null, atS: null });
export const useStatus = () => useContext(StatusContext);

export function useStatusSource(): Status {
  const { content, problem, atS } = useLoad(() => get<Snapshot>("/admin/status?tenants=false"), REFRESH_INTERVAL_MS);
  const seen = useRef<{ now: Snapshot | null; before: Snapshot | null }>({ now: null, before: null });
  if (!content) seen.current = { now: null, before: null };
  else if (content !== seen.current.now) seen.current = { now: content, before: seen.current.now };
  return { snapshot: content, rates: content && ratesBetween(seen.current.before, content), problem, atS };
}
