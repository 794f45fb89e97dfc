// Columns of the table of gateways.
import { count, duration, moment, NONE, plural, short, words } from "../../lib/format.ts";
import { Badge } from "../../ui/badge.tsx";
import { Clip } from "../../ui/clip.tsx";
import type { Column } from "../../ui/table.tsx";
import type { FleetMember } from "./member.ts";

// What there is to say about a gateway beyond its numbers.
export function notesOf(member: FleetMember): string[] {
  const { state, age_s, reasons, drained_since_s, drained_replicas } = member;
  return [
    ...(state === "silent" ? [`not heard of for ${duration(age_s)}; forgotten after a minute`] : []),
    ...(state === "stopping" ? ["finishes its calls, then ends"] : []),
    ...reasons,
    ...(drained_since_s !== null ? [`taken out at ${moment(drained_since_s)}`] : []),
    ...(drained_replicas.length ? [`${plural(drained_replicas.length, "replica")} drained: ${drained_replicas.join(", ")}`] : []),
  ];
}

function Name({ member }: { member: FleetMember }) {
  return (
    <span class="fleet-name">
      <Clip text={member.name} />
      <span class="note">
        {member.is_this ? <Badge value="this one" tone="info" label="answers this page" /> : `process ${member.pid}`}
      </span>
    </span>
  );
}

function State({ member }: { member: FleetMember }) {
  const notes = notesOf(member);
  return (
    <span class="fleet-state">
      <Badge value={member.state} tone={member.state === "silent" ? "bad" : undefined} />
      {notes.map((note) => (
        <span class="note" key={note}>
          {note}
        </span>
      ))}
    </span>
  );
}

function Configuration({ member }: { member: FleetMember }) {
  const sections = member.differs.filter((name) => name !== "version");
  return (
    <span class="fleet-state">
      <span class="mono">{member.configuration}</span>
      {sections.length > 0 && <Badge value="differs" label={`differs in ${sections.join(", ")}`} />}
    </span>
  );
}

export const COLUMNS: Column<FleetMember>[] = [
  { id: "name", title: "Gateway", value: ({ name }) => name, show: (member) => <Name member={member} /> },
  {
    id: "state",
    title: "State",
    value: (member) => [member.state, ...notesOf(member)].join("; "),
    show: (member) => <State member={member} />,
  },
  {
    id: "version",
    title: "Version",
    value: ({ version }) => version,
    show: ({ version, differs }) => (
      <span class="fleet-state">
        {version}
        {differs.includes("version") && <Badge value="differs" label="differs" />}
      </span>
    ),
  },
  {
    id: "configuration",
    title: "Configuration",
    value: ({ configuration, differs }) => [configuration, ...differs].join(" "),
    show: (member) => <Configuration member={member} />,
  },
  { id: "up", title: "Up for", value: ({ uptime_s }) => uptime_s, show: ({ uptime_s }) => duration(uptime_s), kind: "number" },
  { id: "workers", title: "Workers", value: ({ workers }) => workers, kind: "number" },
  {
    id: "calls",
    title: "Calls/s",
    value: ({ load }) => load.calls_per_s,
    show: ({ load }) => (load.calls_per_s === null ? NONE : short(load.calls_per_s)),
    kind: "number",
  },
  { id: "flight", title: "In flight", value: ({ load }) => load.calls_in_flight, kind: "number" },
  { id: "waiting", title: "Waiting", value: ({ load }) => load.queued_inputs, show: ({ load }) => count(load.queued_inputs), kind: "number" },
];

export const stateWords = (members: FleetMember[]) => {
  const states = new Map<string, number>();
  for (const { state } of members) states.set(state, (states.get(state) ?? 0) + 1);
  return [...states].map(([state, number]) => `${number} ${words(state)}`).join(", ");
};
