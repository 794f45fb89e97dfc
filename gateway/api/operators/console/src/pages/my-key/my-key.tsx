// My key: what the holder of a key may do, has used, and has met.
import { KeyRound } from "lucide";
import { count, money, percent, short } from "../../lib/format.ts";
import { useHistory } from "../../lib/history.ts";
import { totalOf } from "../../lib/history-series.ts";
import { useRange } from "../../lib/range.ts";
import { useAccess } from "../../shell/access.ts";
import { Card, Grid } from "../../ui/card.tsx";
import { CostChart, LatencyChart, TokensChart, TrafficChart } from "../../ui/history-charts.tsx";
import { Page } from "../../ui/page.tsx";
import { RangePicker } from "../../ui/range-picker.tsx";
import { Stat } from "../../ui/stat.tsx";
import { Empty, Failure, Note, Skeleton } from "../../ui/states.tsx";
import { CallsCard } from "./calls-card.tsx";
import { FirstCall } from "./first-call.tsx";
import { KeyCard } from "./key-card.tsx";
import { LimitsCard } from "./limits-card.tsx";
import { callsModels, type OwnUsage, useUsage } from "./own.ts";
import { UsageCard } from "./usage-card.tsx";

export function MyKey() {
  const { hasKey } = useAccess();
  if (!hasKey) {
    return (
      <Page title="My key">
        <Card>
          <Empty title="This machine uses the console without a key" icon={KeyRound}>
            Sign in with a key, at the foot of the navigation, to see what it may do and what it has used.
          </Empty>
        </Card>
      </Page>
    );
  }
  return <Own />;
}

function Own() {
  const { content, problem } = useUsage();
  if (!content) {
    return (
      <Page title="My key">
        <Failure problem={problem} id="own-problem" />
        {!problem && <Skeleton rows={5} height={40} />}
      </Page>
    );
  }
  if (callsModels(content) || content.data.length) return <Holder usage={content} />;
  return (
    <Page title="My key" note={`${content.tenant} · ${content.key}`}>
      <Grid>
        <KeyCard usage={content} span={12} />
        <Card id="own-note">
          <Empty title="A key for operators, which calls no models" icon={KeyRound}>
            It opens the operators' pages. Limits, usage and calls are those of keys with the scope embed or rerank.
          </Empty>
        </Card>
      </Grid>
    </Page>
  );
}

function Holder({ usage }: { usage: OwnUsage }) {
  const { models, isDenied } = useAccess();
  const range = useRange("24h");
  const { content: history, problem } = useHistory(range, { path: "/usage/history" });
  const calls = history ? totalOf(history, (point) => point.calls) : 0;
  const failed = history ? totalOf(history, (point) => point.failed) : 0;
  const [tokens, cost] = history ? [totalOf(history, (point) => point.tokens), totalOf(history, (point) => point.cost)] : [0, 0];
  const isNew = !usage.data.length && !calls;
  const first = models && <FirstCall models={models} scopes={usage.scopes} />;
  const span = range.name || "zoom";
  const chart = { history, problem, range };
  return (
    <Page title="My key" note={`${usage.tenant} · ${usage.key}`} actions={<RangePicker range={range} />}>
      <div class="stats">
        <Stat label={`Calls, ${span}`} value={short(calls)} />
        <Stat
          label={`Without success, ${span}`}
          value={calls ? percent(failed / calls) : "–"}
          note={failed ? `${count(failed)} calls; see below` : undefined}
          tone={failed / (calls || 1) > 0.05 ? "warn" : undefined}
        />
        <Stat label={`Tokens, ${span}`} value={short(tokens)} />
        {usage.currency && <Stat label={`Cost, ${span}`} value={money(cost, usage.currency)} />}
      </div>
      <Grid>
        {isNew && first}
        <KeyCard usage={usage} span={5} />
        <LimitsCard usage={usage} span={7} />
        <CallsCard />
        <TrafficChart {...chart} />
        <LatencyChart {...chart} />
        <TokensChart {...chart} />
        {usage.currency && <CostChart {...chart} />}
        <UsageCard currency={usage.currency} />
        {!isNew && first}
      </Grid>
      {!isDenied && usage.scopes.includes("admin") && (
        <Note>This key may open the operators' pages too, with the usage of all tenants.</Note>
      )}
    </Page>
  );
}
