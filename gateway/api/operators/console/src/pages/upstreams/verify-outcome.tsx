// The result of a comparison: what was found in sentences, the replicas, and the cosine of every two.
import { CircleAlert, CircleCheck, CircleX } from "lucide";
import { plural } from "../../lib/format.ts";
import { Badge } from "../../ui/badge.tsx";
import { Icon } from "../../ui/icon.tsx";
import { Table } from "../../ui/table.tsx";
import { VerifyMatrix } from "./verify-matrix.tsx";

export interface Member {
  // Upstream and address.
  name: string;
  upstream: string;
  model_id: string;
  dtype: string | null;
  dimensions: number;
  tokens: number;
  least_norm: number;
  greatest_norm: number;
  fingerprint: string;
  stored: { cosine: number; needed: number; fits: boolean } | null;
}

export interface Pair {
  one: string;
  other: string;
  // Null where the vectors differ in length.
  cosine: number | null;
  fits: boolean;
}

export interface Verification {
  agrees: boolean;
  texts: number;
  members: Member[];
  pairs: Pair[];
  findings: string[];
  // Replicas that returned no vectors, with reasons.
  unread: string[];
}

const differs = ({ members, pairs }: Verification) =>
  members.some(({ stored }) => stored && !stored.fits) || pairs.some(({ fits }) => !fits);

// Replicas that are away are no difference, and no agreement.
function summaryOf(report: Verification) {
  if (report.agrees) return "The vectors agree.";
  const away = report.unread.length;
  const left = away ? `${plural(away, "replica")} could not be compared.` : "";
  return differs(report) ? `There are differences. ${left}`.trim() : left || "This upstream embeds nothing.";
}

const storedOf = ({ stored }: Member) => (stored === null ? "not stored" : stored.fits ? "fits" : "differs");

export function VerifyOutcome({ report }: { report: Verification }) {
  const tone = report.agrees ? "good" : differs(report) ? "bad" : "warn";
  return (
    <>
      <div class={`verdict tone-${tone}`} id="verify-findings">
        <Icon of={{ good: CircleCheck, bad: CircleX, warn: CircleAlert }[tone]} />
        <div>
          <p class="strong" role="status">
            {summaryOf(report)}
          </p>
          <ul>
            {[...report.findings, ...report.unread].map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </div>
      </div>
      {report.members.length > 0 && <Members report={report} />}
      {report.pairs.length > 0 && <VerifyMatrix report={report} />}
    </>
  );
}

const Members = ({ report }: { report: Verification }) => (
  <Table
    label="Compared replicas"
    id="member"
    rows={report.members}
    rowKey={({ name }) => name}
    file="verify"
    columns={[
      { id: "replica", title: "Replica", value: ({ name, upstream }) => `${report.members.findIndex((one) => one.name === name) + 1}. ${name.slice(upstream.length + 1)}`, kind: "long" },
      { id: "outcome", title: "Stored fingerprint", value: storedOf, show: (member) => <Badge value={storedOf(member)} /> },
      { id: "cosine", title: "Cosine with it", value: ({ stored }) => stored?.cosine ?? null, kind: "number", show: ({ stored }) => stored?.cosine.toFixed(5) ?? "–" },
      { id: "model", title: "Model", value: ({ model_id }) => model_id },
      { id: "dtype", title: "Type", value: ({ dtype }) => dtype },
      { id: "width", title: "Width", value: ({ dimensions }) => dimensions, kind: "number" },
      {
        id: "lengths",
        title: "Lengths",
        value: ({ least_norm }) => least_norm,
        kind: "number",
        show: ({ least_norm, greatest_norm }) => `${least_norm.toFixed(3)}–${greatest_norm.toFixed(3)}`,
      },
      { id: "tokens", title: "Tokens", value: ({ tokens }) => tokens, kind: "number" },
      { id: "fingerprint", title: "Fingerprint", value: ({ fingerprint }) => fingerprint },
    ]}
  />
);
