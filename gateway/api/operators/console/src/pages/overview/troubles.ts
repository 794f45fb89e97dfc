// Rules of what an operator should look at, the worst first, each with the page where it is mended.
import { moment, percent, plural, short, words } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import type { Snapshot } from "../../lib/types.ts";
import type { Now } from "./now.ts";

export interface Trouble {
  tone: "bad" | "warn" | "info";
  text: string;
  href: string;
}

const NAMES_MAX = 3;
const BAD_SHARE = 0.01;
const RANKS = { bad: 0, warn: 1, info: 2 };
const UNUSABLE = ["unavailable", "refused"];

const some = (names: string[]) =>
  names.length > NAMES_MAX ? `${names.slice(0, NAMES_MAX).join(", ")} and ${names.length - NAMES_MAX} more` : names.join(", ");

function grouped<Row>(rows: Row[], key: (row: Row) => string): Row[][] {
  const groups = new Map<string, Row[]>();
  for (const row of rows) groups.set(key(row), [...(groups.get(key(row)) ?? []), row]);
  return [...groups.values()];
}

function* ofStore({ store }: Snapshot): Generator<Trouble> {
  if (store.away) {
    const reason = store.reason ? `: ${store.reason}` : "";
    yield { tone: "bad", text: `The quota store is unavailable${reason}.`, href: href("fleet") };
  }
  if (store.loss) {
    const { tenants, keys, until_s } = store.loss;
    const lost = [tenants && plural(tenants, "tenant"), keys && plural(keys, "key")].filter(Boolean).join(" and ");
    yield {
      tone: "bad",
      text: `Redis has lost ${lost || "records"}: ${store.loss.reason}. They stay valid until ${moment(until_s)}.`,
      href: href(tenants ? "tenants" : "keys"),
    };
  }
}

function* ofModels({ models }: Snapshot): Generator<Trouble> {
  const [trial, others] = [
    models.filter(({ state }) => state === "canary_only"),
    models.filter(({ state }) => !["ready", "canary_only"].includes(state)),
  ];
  for (const { name, upstream } of trial) {
    yield {
      tone: "bad",
      text: `Calls of ${name} fail: upstream ${upstream} has no replica in use, and the canary takes its share only.`,
      href: href("models", [name]),
    };
  }
  for (const group of grouped(others, ({ state }) => state)) {
    const { name, state } = group[0]!;
    const is = words(state);
    const isAlone = group.length === 1;
    yield {
      tone: UNUSABLE.includes(state) ? "bad" : "info",
      text: isAlone ? `Model ${name} is ${is}.` : `${group.length} models are ${is}: ${some(group.map((one) => one.name))}.`,
      href: isAlone ? href("models", [name]) : href("models"),
    };
  }
  for (const model of models) {
    for (const { name, standing, reason } of model.upstreams ?? []) {
      if (!["refused", "withdrawn"].includes(standing)) continue;
      yield { tone: "warn", text: `Upstream ${name} of ${model.name} is ${standing}: ${reason}`, href: href("models", [model.name]) };
    }
  }
}

function* ofReplicas({ replicas }: Snapshot): Generator<Trouble> {
  const down = replicas.filter(({ state, is_drained }) => state === "down" && !is_drained);
  for (const group of grouped(down, ({ upstream, reason }) => `${upstream}\n${reason}`)) {
    const { name, upstream, reason } = group[0]!;
    const all = replicas.filter((replica) => replica.upstream === upstream).length;
    const which = group.length === 1 ? `Replica ${name} of ${upstream} is down` : `${group.length} of ${all} replicas of ${upstream} are down`;
    const isServing = replicas.some((replica) => replica.upstream === upstream && replica.state === "up" && !replica.is_drained);
    yield { tone: isServing ? "warn" : "bad", text: `${which}: ${reason}`, href: href("upstreams", [upstream]) };
  }
  for (const group of grouped(replicas.filter(({ is_drained }) => is_drained), ({ upstream }) => upstream)) {
    const { name, upstream, state } = group[0]!;
    const text = group.length === 1 ? `Replica ${name} of ${upstream} is drained (${state}).` : `${group.length} replicas of ${upstream} are drained.`;
    yield { tone: "warn", text, href: href("upstreams", [upstream]) };
  }
}

function* ofCalls({ drained_since_s }: Snapshot, now: Now | null): Generator<Trouble> {
  if (now?.failed) {
    const kinds = now.kinds.slice(0, NAMES_MAX).map(([kind, perS]) => `${words(kind)} ${short(perS * 60)} a minute`);
    yield {
      tone: now.failed >= BAD_SHARE ? "bad" : "warn",
      text: `${percent(now.failed)} of the calls fail now: ${kinds.join(" · ")}`,
      href: href("calls", [], { failed: "true" }),
    };
  }
  if (drained_since_s !== null) {
    const text = `This gateway was taken out at ${moment(drained_since_s)}: load balancers send it no calls.`;
    yield { tone: "warn", text, href: href("fleet") };
  }
}

function* ofInstances({ instances }: Snapshot): Generator<Trouble> {
  for (const { name, status, reason } of instances) {
    if (status === "failed") yield { tone: "bad", text: `Instance ${name} failed: ${reason ?? "see its log"}`, href: href("models", [], { tab: "host" }) };
  }
}

export function troublesOf(snapshot: Snapshot, now: Now | null): Trouble[] {
  const found = [
    ...ofStore(snapshot),
    ...ofCalls(snapshot, now),
    ...ofModels(snapshot),
    ...ofReplicas(snapshot),
    ...ofInstances(snapshot),
  ];
  return found.toSorted((one, other) => RANKS[one.tone] - RANKS[other.tone]);
}
