// The part of the address behind #: /page/name?parameter=value. All that a page shows is in it, so that a link can be
// shared, and a reload or the way back shows the same.
import { useEffect, useState } from "preact/hooks";

export interface Route {
  page: string;
  // What follows the page, such as a tenant's name.
  rest: string[];
  query: URLSearchParams;
}

function decoded(part: string) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function readRoute(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page = "", ...rest] = path.split("/").map(decoded);
  return { page, rest: rest.filter(Boolean), query: new URLSearchParams(query) };
}

// The address of a page: href("tenants", ["acme"], {range: "24h"}).
export function href(page: string, rest: string[] = [], query: Record<string, string | number | null | undefined> = {}) {
  const path = [page, ...rest].map(encodeURIComponent).join("/");
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

const followers = new Set<() => void>();
const notify = () => followers.forEach((follow) => follow());
addEventListener("hashchange", notify);

export const go = (address: string) => void (location.hash = address.replace(/^#/, ""));

// Changes parameters of this page's address without a step in the history. null removes one.
export function setQuery(changes: Record<string, string | number | null>) {
  const { page, rest, query } = readRoute();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  history.replaceState(null, "", href(page, rest, Object.fromEntries(query)));
  notify();
}

export function useRoute(): Route {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const follow = () => setRoute(readRoute());
    followers.add(follow);
    follow();
    return () => void followers.delete(follow);
  }, []);
  return route;
}

// A parameter of the address as state. A value that equals the fallback is left out.
export function useParam(name: string, fallback = ""): [string, (value: string) => void] {
  const { query } = useRoute();
  const set = (value: string) => setQuery({ [name]: value === fallback ? null : value });
  return [query.get(name) ?? fallback, set];
}
