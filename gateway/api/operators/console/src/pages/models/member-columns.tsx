// Columns about one upstream of a model: its part, and how it stands.
import { count, NONE, percent } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import type { ModelUpstream } from "../../lib/types.ts";
import { Badge } from "../../ui/badge.tsx";
import { Clip } from "../../ui/clip.tsx";
import type { Column } from "../../ui/table.tsx";

// model: its name.
export type Member = ModelUpstream & { model: string };

// The share of a canary or a mirror; of the others, weight and priority.
export function shareOf({ share, weight, priority }: ModelUpstream) {
  return share === null ? `weight ${weight}, priority ${priority}` : `${percent(share)} of calls`;
}

const Cosine = ({ member: { cosine, min_cosine } }: { member: Member }) => (
  <div class="two-lines">
    <span>{cosine === null ? NONE : cosine.toFixed(4)}</span>
    {min_cosine !== null && <span class="note">{`at least ${min_cosine}`}</span>}
  </div>
);

export const memberColumns = (): Column<Member>[] => [
  {
    id: "upstream",
    title: "Upstream",
    value: ({ name }) => name,
    show: ({ name }) => (
      <a class="clip" href={href("upstreams", [name])} title={name} dir="auto">
        {name}
      </a>
    ),
  },
  { id: "role", title: "Role", value: ({ role }) => role },
  {
    id: "standing",
    title: "Standing",
    value: ({ standing }) => standing,
    // No good news of an upstream without a replica in use.
    show: ({ standing, state, reason }) => (
      <div class="two-lines">
        <Badge value={standing} tone={standing === "serving" && state !== "ready" ? "quiet" : undefined} />
        {reason && <Clip class="note" text={reason} />}
      </div>
    ),
  },
  { id: "state", title: "State", value: ({ state }) => state, show: ({ state }) => <Badge value={state} /> },
  { id: "share", title: "Share", value: shareOf },
  { id: "calls", title: "Calls", value: ({ calls }) => calls, kind: "number", show: ({ calls }) => count(calls) },
  { id: "cosine", title: "Least cosine", value: ({ cosine }) => cosine, kind: "number", show: (member) => <Cosine member={member} /> },
  { id: "reason", title: "Why", value: ({ reason }) => reason, kind: "hidden" },
];
