// The API key of this tab. It is kept in the tab's session storage, so that a reload keeps it, and forgotten when
// the tab is closed, on sign-out, and when the gateway refuses it.
import { useEffect, useState } from "preact/hooks";

const STORED = "gateway.key";
const changed = new Set<() => void>();

let key = sessionStorage.getItem(STORED) ?? "";
let reason = "";
// Grows with each key that is used: what was read with another key is asked for again.
let turn = 0;

export const hasKey = () => key !== "";
export const currentKey = () => key;

// note: why there is no key any more, for the sign-in screen. isKept: false for tokens of an issuer, which end soon.
export function setKey(text: string, note = "", isKept = true) {
  key = text;
  reason = note;
  turn += 1;
  if (text && isKept) sessionStorage.setItem(STORED, text);
  else sessionStorage.removeItem(STORED);
  for (const notify of changed) notify();
}

export interface Session {
  hasKey: boolean;
  turn: number;
  reason: string;
}

export function useSession(): Session {
  const [, setCount] = useState(0);
  useEffect(() => {
    const notify = () => setCount((count) => count + 1);
    changed.add(notify);
    return () => void changed.delete(notify);
  }, []);
  return { hasKey: hasKey(), turn, reason };
}
