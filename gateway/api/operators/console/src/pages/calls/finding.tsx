// Why a call failed: the kind of its error in a sentence, what to do, and the words of the upstream.
import { plural } from "../../lib/format.ts";
import { errorKind } from "../../lib/error-kinds.ts";
import { href } from "../../lib/route.ts";
import { toneOfStatus } from "../../ui/badge.tsx";
import { Said } from "../../ui/said.tsx";
import { type Call, isFailed } from "./call.ts";
import { DownReplicas } from "./down-replicas.tsx";

function Upstream({ call }: { call: Call }) {
  if (!call.upstream_status && !call.upstream_words) return null;
  return (
    <figure class="quote">
      <figcaption class="note">{`The upstream's last answer: ${call.upstream_status ?? "no status"}`}</figcaption>
      {call.upstream_words && (
        <pre dir="auto" tabIndex={0}>
          {call.upstream_words}
        </pre>
      )}
    </figure>
  );
}

export function Finding({ call }: { call: Call }) {
  const tries = call.attempts > 1 ? `It took ${plural(call.attempts, "attempt")}.` : "";
  if (!isFailed(call)) {
    const cut = call.truncated_inputs
      ? `${plural(call.truncated_inputs, "input")} ${call.truncated_inputs === 1 ? "was" : "were"} longer than the model reads, and cut.`
      : "";
    if (!tries && !cut) return null;
    return (
      <div class="finding tone-warn">
        <p>{`${cut} ${tries}`.trim()}</p>
        <Upstream call={call} />
      </div>
    );
  }
  const { means, advice } = errorKind(call.outcome);
  return (
    <div class={`finding tone-${toneOfStatus(call.status)}`} id="finding">
      <p>
        <b>{means}</b> {tries}
      </p>
      {call.message && <Said message={call.message} />}
      {call.outcome === "no_replica" ? <DownReplicas model={call.model} otherwise={advice} /> : <p>{advice}</p>}
      <Upstream call={call} />
      <p class="row">
        {call.tenant && call.outcome === "quota_exceeded" && <a href={href("tenants", [call.tenant])}>Limits of the tenant</a>}
        {["no_replica", "upstream_failed", "overloaded", "deadline_exceeded"].includes(call.outcome) && (
          <a href={href("upstreams")}>Upstreams</a>
        )}
        <a href="/docs">All kinds of errors</a>
      </p>
    </div>
  );
}
