// Recent calls of all workers.
import { useState } from "preact/hooks";
import { send, STATUS_TIMEOUT_MS } from "../api.js";
import { clock, count, milliseconds, NONE } from "../format.js";
import { usePolling } from "../hooks.js";
import { Note, Problem, State, Table, TextField } from "../parts.jsx";

// Stages that take a part of the time worth a look.
const SHARE_MIN = 0.02;

const stagesOf = ({ stages, duration_s: totalS }) =>
  Object.entries(stages)
    .filter(([, seconds]) => seconds >= totalS * SHARE_MIN)
    .map(([name, seconds]) => `${name} ${milliseconds(seconds)}`)
    .join(" · ");

// Where it was sent, and the upstream's last answer that was no success.
const triesOf = ({ replicas, attempts, upstream_status: status, upstream_words: words }) =>
  [replicas.join(" → "), attempts > 1 && `${count(attempts)} attempts`, status, words].filter(Boolean).join(" · ") ||
  NONE;

export function Calls({ turn }) {
  const [tenant, setTenant] = useState("");
  const [model, setModel] = useState("");
  const [failed, setFailed] = useState(false);
  const query = new URLSearchParams();
  if (tenant) query.set("tenant", tenant);
  if (model) query.set("model", model);
  if (failed) query.set("failed", "true");
  const { content, problem } = usePolling(
    async () => (await send(`/admin/calls?${query}`, { timeoutMs: STATUS_TIMEOUT_MS })).content,
    2000,
    `${turn} ${query}`,
  );
  const calls = content?.calls ?? [];
  return (
    <>
      <form class="row" onSubmit={(event) => event.preventDefault()}>
        <TextField label="Tenant" id="calls-tenant" value={tenant} onInput={setTenant} />
        <TextField label="Model" id="calls-model" value={model} onInput={setModel} />
        <label class="check">
          <input type="checkbox" checked={failed} onChange={(event) => setFailed(event.currentTarget.checked)} /> only
          failed
        </label>
      </form>
      <Problem>{problem?.message}</Problem>
      <Note>The last {content?.kept ?? 250} calls, without any content. The log has all of them.</Note>
      <Table
        id="calls"
        label="Recent calls"
        empty="No calls yet."
        columns={[
          ["at"],
          ["outcome"],
          ["tenant", "text"],
          ["key"],
          ["model", "text"],
          ["path"],
          ["inputs", "number"],
          ["tokens", "number"],
          ["time", "number"],
          ["of which", "text"],
          ["replicas and their words", "text"],
          ["request id"],
        ]}
        rows={calls.map((call) => [
          clock(call.at_s),
          <State value={call.outcome === "ok" ? "ok" : `${call.status} ${call.outcome}`} />,
          call.tenant ?? NONE,
          call.key_id ?? NONE,
          call.model ?? NONE,
          call.route,
          count(call.inputs),
          count(call.tokens),
          milliseconds(call.duration_s),
          stagesOf(call),
          triesOf(call),
          <code>{call.request_id}</code>,
        ])}
      />
    </>
  );
}
