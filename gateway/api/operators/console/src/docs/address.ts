// The part of the address behind #: an operation and the search, as in #POST/v1/embeddings?q=dimensions, so that a link
// to it can be shared.
import { useEffect, useState } from "preact/hooks";
import type { Operation } from "./document.ts";

export interface Place {
  // Method and path, as in "POST/v1/embeddings"; empty at the start.
  id: string;
  query: string;
}

function decoded(text: string) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function readPlace(): Place {
  const [id = "", rest = ""] = location.hash.slice(1).split(/\?(.*)/s);
  return { id: decoded(id), query: new URLSearchParams(rest).get("q") ?? "" };
}

export function addressOf({ id, query }: Place) {
  // Braces are readable in a link, and allowed in it.
  const place = encodeURI(id).replaceAll("%7B", "{").replaceAll("%7D", "}");
  return `#${place}${query ? `?${new URLSearchParams({ q: query })}` : ""}`;
}

// The operation that an address names, by any of its paths.
export function findOperation(operations: Operation[], id: string): [Operation, string] | null {
  for (const operation of operations) {
    const path = operation.aliases.find((alias) => operation.method + alias === id);
    if (path !== undefined) return [operation, path];
  }
  return null;
}

export function usePlace(): [Place, (place: Place, isStep: boolean) => void] {
  const [place, setPlace] = useState(readPlace);
  useEffect(() => {
    const follow = () => setPlace(readPlace());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  // isStep: the way back returns to the place before.
  const go = (next: Place, isStep: boolean) => {
    const address = addressOf(next);
    if (isStep) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
    setPlace(next);
  };
  return [place, go];
}
