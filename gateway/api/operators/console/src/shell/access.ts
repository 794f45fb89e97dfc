// What the key of this tab may do, and the models that it may call.
import { createContext } from "preact";
import { useContext, useState } from "preact/hooks";
import { get, type RequestError } from "../lib/api.ts";
import { useLoad } from "../lib/load.ts";
import { hasKey } from "../lib/session.ts";

export interface ListedModel {
  id: string;
  // Other fields, as /v1/models lists them.
  [field: string]: unknown;
}

export interface Access {
  hasKey: boolean;
  // Null while they are read, and without a key.
  models: ListedModel[] | null;
  // Undefined while they are not known: without the quota store the console offers every page.
  scopes: string[] | undefined;
  tenant: string | undefined;
  problem: RequestError | null;
  // What the key may do was asked for, with or without success.
  isRead: boolean;
  // The operators' pages are refused to this key.
  isDenied: boolean;
  // This key, or this machine, may change things.
  canChange: boolean;
}

export const AccessContext = createContext<Access>({
  hasKey: false,
  models: null,
  scopes: undefined,
  tenant: undefined,
  problem: null,
  isRead: false,
  isDenied: false,
  canChange: true,
});
export const useAccess = () => useContext(AccessContext);

// An operator has one of these scopes.
const OPERATORS = ["admin", "admin:read"];

const ASK_AGAIN_MS = 10_000;

export function useAccessSource(isDenied: boolean): Access {
  // While the store is late or away, it is not known what the key may do.
  const [isKnown, setKnown] = useState(true);
  const { content, problem } = useLoad(async () => {
    if (!hasKey()) return null;
    const models = (await get<{ data: ListedModel[] }>("/v1/models")).data;
    const own = await get<{ scopes?: string[]; tenant?: string }>("/usage").catch(() => null);
    setKnown(own !== null);
    return { models, scopes: own?.scopes, tenant: own?.tenant };
  }, isKnown ? null : ASK_AGAIN_MS);
  const scopes = content?.scopes;
  return {
    hasKey: hasKey(),
    models: content?.models ?? null,
    scopes,
    tenant: content?.tenant,
    problem,
    isRead: content !== null || problem !== null,
    // On the gateway's own machine the status is there for any key; what the key may do decides all the same.
    isDenied: isDenied || Boolean(scopes && !OPERATORS.some((scope) => scopes.includes(scope))),
    // Without a key the operators' pages only read, also on the gateway's own machine.
    canChange: hasKey() && (!scopes || scopes.includes("admin")),
  };
}
