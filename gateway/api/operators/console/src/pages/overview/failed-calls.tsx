// What failed: the last failed calls by kind and model, with links to the calls themselves.
import { CircleCheck } from "lucide";
import { get } from "../../lib/api.ts";
import { failureClass } from "../../lib/failures.ts";
import { ago, plural } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import { Badge } from "../../ui/badge.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";

const REFRESH_INTERVAL_MS = 10_000;
const SHOWN = 7;
const TONES = { gateway: "bad", refused: "warn", caller: "quiet" } as const;

interface FailedCall {
  at_s: number;
  outcome: string;
  tenant: string | null;
  model: string | null;
  upstream_words: string | null;
}

interface Group {
  kind: string;
  model: string | null;
  calls: number;
  // Of the newest call.
  atS: number;
  tenants: Set<string>;
  upstreamWords: string | null;
}

// calls: the newest first.
export function groupsOf(calls: FailedCall[]): Group[] {
  const groups = new Map<string, Group>();
  for (const { outcome, model, at_s, tenant, upstream_words } of calls) {
    const key = `${outcome} ${model ?? ""}`;
    const group = groups.get(key) ?? { kind: outcome, model, calls: 0, atS: at_s, tenants: new Set(), upstreamWords: null };
    group.calls += 1;
    group.upstreamWords ??= upstream_words;
    if (tenant !== null) group.tenants.add(tenant);
    groups.set(key, group);
  }
  const rank = ({ kind }: Group) => (failureClass(kind) === "gateway" ? 0 : 1);
  return [...groups.values()].sort((one, other) => rank(one) - rank(other) || other.calls - one.calls);
}

function Row({ group }: { group: Group }) {
  const { kind, model, calls, atS, tenants, upstreamWords } = group;
  const [only] = tenants;
  const query = { failed: "true", model, tenant: tenants.size === 1 ? only : null };
  const who = tenants.size === 1 ? only! : plural(tenants.size, "tenant");
  return (
    <li>
      <a class="failed-row" href={href("calls", [], query)}>
        <span class="failed-what">
          <Badge value={kind} tone={TONES[failureClass(kind)]} />
          <Clip text={model ?? "no model"} class="failed-model" />
        </span>
        <b class="failed-calls">{plural(calls, "call")}</b>
        <Clip text={[who, upstreamWords].filter(Boolean).join(" · ")} class="failed-who" />
        <span class="failed-at">{ago(atS)}</span>
      </a>
    </li>
  );
}

export function FailedCalls() {
  const { content, problem } = useLoad(() => get<{ calls: FailedCall[] }>("/admin/calls?failed=true"), REFRESH_INTERVAL_MS);
  const groups = content ? groupsOf(content.calls) : [];
  const hidden = groups.length - SHOWN;
  return (
    <Card
      title="What failed"
      note="Among the recent calls that are kept"
      span={6}
      id="failed-calls"
      actions={<a href={href("calls", [], { failed: "true" })}>All failed calls</a>}
    >
      <Failure problem={problem} />
      {!content && !problem && <Skeleton rows={4} height={34} />}
      {content && !groups.length && (
        <Empty title="Nothing failed" icon={CircleCheck}>
          Calls that end with an error are listed here by kind and model.
        </Empty>
      )}
      <ol class="failed">
        {groups.slice(0, SHOWN).map((group) => (
          <Row key={`${group.kind} ${group.model}`} group={group} />
        ))}
      </ol>
      {hidden > 0 && <p class="note top-others">{`${plural(hidden, "more kind")} among the failed calls`}</p>}
    </Card>
  );
}
