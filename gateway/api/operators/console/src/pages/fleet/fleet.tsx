// Fleet: the gateways that share a Redis, with state, configuration and load.
import { get } from "../../lib/api.ts";
import { plural, short } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import { Card } from "../../ui/card.tsx";
import { Page } from "../../ui/page.tsx";
import { Stat } from "../../ui/stat.tsx";
import { Failure, Problem, Skeleton } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { COLUMNS, stateWords } from "./columns.tsx";
import { DrainButton } from "./drain-button.tsx";
import type { FleetMember, FleetReport } from "./member.ts";
import { ShareHint } from "./share-hint.tsx";

// A gateway renews its record every two seconds.
const REFRESH_INTERVAL_MS = 4000;

const sum = (members: FleetMember[], value: (member: FleetMember) => number | null) =>
  members.reduce((total, member) => total + (value(member) ?? 0), 0);

function Figures({ report }: { report: FleetReport }) {
  const { members, configurations, versions } = report;
  const ready = members.filter(({ state }) => state === "ready").length;
  const isKnown = members.some(({ load }) => load.calls_per_s !== null);
  return (
    <div class="stats" id="fleet-figures">
      <Stat
        label="Gateways ready"
        value={`${ready} of ${members.length}`}
        note={stateWords(members)}
        tone={ready === members.length ? "good" : ready ? "warn" : "bad"}
      />
      <Stat
        label="Configurations"
        value={configurations}
        note={configurations > 1 ? "marked where a gateway differs" : "all gateways agree"}
        tone={configurations > 1 ? "warn" : undefined}
      />
      <Stat
        label="Versions"
        value={versions}
        note={versions > 1 ? "a rollout, or one that stopped" : members[0]?.version}
        tone={versions > 1 ? "warn" : undefined}
      />
      <Stat
        label="Calls per second"
        value={isKnown ? short(sum(members, ({ load }) => load.calls_per_s)) : "–"}
        note={`${plural(sum(members, ({ load }) => load.calls_in_flight), "call")} in flight`}
        href={href("calls", [], { fleet: members.length > 1 ? "true" : null })}
      />
    </div>
  );
}

export function Fleet() {
  const { content: report, problem, reload } = useLoad(() => get<FleetReport>("/admin/fleet"), REFRESH_INTERVAL_MS);
  const own = report?.members.find(({ is_this }) => is_this);
  const others = report?.members.filter(({ is_this, state }) => !is_this && state === "ready").length ?? 0;
  return (
    <Page
      title="Fleet"
      note={report?.shared ? "The gateways that share this gateway's Redis" : undefined}
      actions={own && <DrainButton member={own} isOnly={!others} onDone={reload} />}
    >
      <Failure problem={problem} />
      <Problem id="fleet-problem">{report?.problem && `Other gateways are not known now: ${report.problem}`}</Problem>
      {!report && !problem && <Skeleton rows={4} height={60} />}
      {report && (
        <>
          <Figures report={report} />
          <Card
            title="Gateways"
            isFlush
            id="fleet"
            note={report.members.length > 1 ? "Another gateway is taken out on its own console, or by gateway drain on its machine." : undefined}
          >
            <Table label="Gateways" rows={report.members} rowKey={({ id }) => id} columns={COLUMNS} file={report.members.length > 1 ? "gateways" : undefined} />
          </Card>
          {!report.shared && <ShareHint />}
        </>
      )}
    </Page>
  );
}
