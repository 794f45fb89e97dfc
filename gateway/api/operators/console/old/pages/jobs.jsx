// Batches: those of all tenants with an operator's key, else those of the key's own tenant.
import { useRef } from "preact/hooks";
import { RequestError, saveFile, send } from "../api.js";
import { bytes, count, duration, NONE } from "../format.js";
import { useAction, usePolling } from "../hooks.js";
import { Answer, ask, Failure, Note, State, Table } from "../parts.jsx";

const REFRESH_INTERVAL_MS = 2000;
// A page keeps a whole file in memory before the browser writes it.
const DOWNLOAD_BYTES_MAX = 256e6;
const PROBLEMS_SHOWN = 3;
const CANCELLABLE = ["validating", "in_progress"];

// The batches, and whose they are. A status of 404 says that the gateway has none, and how it gets them.
function useBatches(turn) {
  // The turn of a key that may not see all. Each refusal has a line in the gateway's log.
  const refusedTurn = useRef(null);
  return usePolling(
    async () => {
      if (refusedTurn.current !== turn) {
        try {
          const { content } = await send("/admin/batches?limit=50");
          return { isOwn: false, rows: content.data, hasMore: content.has_more };
        } catch (error) {
          if (![401, 403].includes(error.status)) throw error;
          refusedTurn.current = turn;
        }
      }
      const { content } = await send("/v1/batches?limit=50");
      return { isOwn: true, rows: content.data.map((batch) => ({ batch })), hasMore: content.has_more };
    },
    REFRESH_INTERVAL_MS,
    turn,
  );
}

// Lines that a cancelled or expired batch left have a result, which counts as failed.
function Progress({ batch }) {
  const { total, completed, failed, unexecuted = 0 } = batch.request_counts;
  if (!total) return NONE;
  const run = completed + failed - unexecuted;
  const facts = [
    `${count(run)} of ${count(total)}`,
    ...(failed > unexecuted ? [`${count(failed - unexecuted)} failed`] : []),
    ...(unexecuted ? [`${count(unexecuted)} not run`] : []),
  ];
  return (
    <>
      <progress max={total} value={run} aria-label={`Progress of ${batch.id}`} /> {facts.join(", ")}
    </>
  );
}

// Lines with the same problem are named together.
function problemsOf(batch) {
  const linesOf = new Map();
  for (const { line, message } of batch.errors?.data ?? []) linesOf.set(message, [...(linesOf.get(message) ?? []), line]);
  const shown = [...linesOf].slice(0, PROBLEMS_SHOWN).map(([message, lines]) => {
    if (!lines[0]) return message;
    if (lines.length === 1) return `line ${lines[0]}: ${message}`;
    const more = lines.length > PROBLEMS_SHOWN ? ` and ${count(lines.length - PROBLEMS_SHOWN)} more` : "";
    return `lines ${lines.slice(0, PROBLEMS_SHOWN).join(", ")}${more}: ${message}`;
  });
  const left = linesOf.size - shown.length;
  return left > 0 ? `${shown.join("; ")}; and ${count(left)} more problems` : shown.join("; ");
}

// Why it waits, or why it failed.
function reasonOf(batch) {
  return batch.wait_reason ? `Waits: ${batch.wait_reason}` : problemsOf(batch);
}

async function download(fileId) {
  const { content: file } = await send(`/v1/files/${fileId}`);
  if (file.bytes > DOWNLOAD_BYTES_MAX) {
    throw new RequestError(0, `${bytes(file.bytes)} are too much for a page: use gateway batch fetch`);
  }
  const { content } = await send(`/v1/files/${fileId}/content`, { as: "text" });
  saveFile(content, "application/jsonl", file.filename);
  return `${file.filename}, ${bytes(file.bytes)}`;
}

function Files({ batch, run, busy }) {
  const files = [
    ["Results", batch.output_file_id],
    ["Errors", batch.error_file_id],
  ].filter(([, id]) => id);
  return files.map(([name, id]) => (
    <button type="button" class="quiet short" disabled={busy} aria-label={`${name} of ${batch.id}`} onClick={() => run(id)}>
      {name}
    </button>
  ));
}

export function Jobs({ turn }) {
  const { content, problem } = useBatches(turn);
  const fetched = useAction(download);
  const cancelled = useAction(async (id) => {
    await send(content.isOwn ? `/v1/batches/${id}/cancel` : `/admin/batches/${id}/cancel`, { method: "POST" });
    return `${id} is being cancelled; its results so far are kept.`;
  });
  const now = Date.now() / 1000;
  const row = ({ batch, tenant, key }) => [
    batch.id,
    ...(content.isOwn ? [] : [`${tenant} · ${key}`]),
    <State value={batch.status} />,
    <Progress batch={batch} />,
    batch.model ?? NONE,
    `${duration(Math.max(0, now - batch.created_at))} ago`,
    reasonOf(batch) || NONE,
    CANCELLABLE.includes(batch.status) ? (
      <button
        type="button"
        class="quiet short"
        aria-label={`Cancel ${batch.id}`}
        onClick={ask(`Cancel ${batch.id}?`, () => cancelled.run(batch.id))}
      >
        Cancel
      </button>
    ) : (
      content.isOwn && <Files batch={batch} run={fetched.run} busy={fetched.busy} />
    ),
  ];
  const owner = content?.isOwn ? [] : [["tenant and key", "text"]];
  return (
    <>
      <Failure id="jobs-problem" problem={problem} isPlain={problem?.isKeyMissing || problem?.status === 404} />
      {content && (
        <>
          <Note id="jobs-owner">
            {content.isOwn ? "Batches of your tenant." : "Batches of all tenants. Results are fetched with a key of their tenant."}
            {content.hasMore ? " The newest 50." : ""}
          </Note>
          <Table
            id="jobs"
            label="Batches"
            empty="No batches yet."
            columns={[["batch", "text"], ...owner, ["status"], ["lines", "text"], ["model", "text"], ["created", "short"], ["reason", "text long"], [""]]}
            rows={content.rows.map(row)}
          />
          <Answer id="jobs-download" action={fetched}>
            <p role="status">{fetched.outcome}</p>
          </Answer>
          <Answer id="jobs-cancel" action={cancelled}>
            <p role="status">{cancelled.outcome}</p>
          </Answer>
        </>
      )}
    </>
  );
}
