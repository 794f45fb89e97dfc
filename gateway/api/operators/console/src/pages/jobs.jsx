// Batches: those of all tenants with an operator's key, else those of the key's own tenant.
import { RequestError, send } from "../api.js";
import { bytes, count, duration, NONE } from "../format.js";
import { useAction, usePolling } from "../hooks.js";
import { Answer, ask, Note, Problem, State, Table } from "../parts.jsx";

const REFRESH_INTERVAL_MS = 2000;
// A page keeps a whole file in memory before the browser writes it.
const DOWNLOAD_BYTES_MAX = 256e6;
const ENDED = ["completed", "failed", "expired", "cancelled"];

// The batches, and whose they are. A listener for operators only has no own ones, one for callers no others.
async function batches() {
  const own = async () => {
    const { content } = await send("/v1/batches?limit=50");
    return { isOwn: true, rows: content.data.map((batch) => ({ batch })), hasMore: content.has_more };
  };
  try {
    const { content } = await send("/admin/batches?limit=50");
    return { isOwn: false, rows: content.data, hasMore: content.has_more };
  } catch (error) {
    if (![401, 403, 404].includes(error.status)) throw error;
    return own();
  }
}

function Progress({ batch }) {
  const { total, completed, failed } = batch.request_counts;
  if (!total) return NONE;
  const text = `${count(completed + failed)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}`;
  return (
    <>
      <progress max={total} value={completed + failed} aria-label={`Progress of ${batch.id}`} /> {text}
    </>
  );
}

// Why it waits, or why it failed.
function reasonOf(batch) {
  if (batch.wait_reason) return `Waits: ${batch.wait_reason}`;
  const problems = batch.errors?.data ?? [];
  const shown = problems.slice(0, 3).map(({ line, message }) => (line ? `line ${line}: ${message}` : message));
  return problems.length > 3 ? `${shown.join("; ")}; and ${problems.length - 3} more` : shown.join("; ");
}

async function download(fileId) {
  const { content: file } = await send(`/v1/files/${fileId}`);
  if (file.bytes > DOWNLOAD_BYTES_MAX) {
    throw new RequestError(0, `${bytes(file.bytes)} are too much for a page: use gateway batch fetch`);
  }
  const { content } = await send(`/v1/files/${fileId}/content`, { as: "text" });
  const address = URL.createObjectURL(new Blob([content], { type: "application/jsonl" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = file.filename;
  link.click();
  URL.revokeObjectURL(address);
  return `${file.filename}, ${bytes(file.bytes)}`;
}

function Files({ batch, run, busy }) {
  const files = [
    ["Results", batch.output_file_id],
    ["Errors", batch.error_file_id],
  ].filter(([, id]) => id);
  return files.map(([name, id]) => (
    <button type="button" class="quiet" disabled={busy} aria-label={`${name} of ${batch.id}`} onClick={() => run(id)}>
      {name}
    </button>
  ));
}

export function Jobs({ turn }) {
  const { content, problem } = usePolling(batches, REFRESH_INTERVAL_MS, turn);
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
    ENDED.includes(batch.status) ? (
      content.isOwn && <Files batch={batch} run={fetched.run} busy={fetched.busy} />
    ) : (
      <button
        type="button"
        class="quiet"
        aria-label={`Cancel ${batch.id}`}
        onClick={ask(`Cancel ${batch.id}?`, () => cancelled.run(batch.id))}
      >
        Cancel
      </button>
    ),
  ];
  const owner = content?.isOwn ? [] : [["tenant and key", "text"]];
  return (
    <>
      <Problem id="jobs-problem">{problem?.message}</Problem>
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
            columns={[["batch"], ...owner, ["status"], ["lines", "text"], ["model", "text"], ["created"], ["reason", "text"], [""]]}
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
