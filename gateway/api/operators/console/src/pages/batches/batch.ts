// A batch, as /v1/batches and /admin/batches describe it, and what is read from it.
import { count } from "../../lib/format.ts";

export interface Batch {
  id: string;
  endpoint: string;
  status: string;
  model: string | null;
  created_at: number;
  in_progress_at: number | null;
  finalizing_at: number | null;
  completed_at: number | null;
  failed_at: number | null;
  expired_at: number | null;
  cancelling_at: number | null;
  cancelled_at: number | null;
  expires_at: number;
  request_counts: { total: number; completed: number; failed: number; unexecuted?: number };
  usage: { total_tokens: number; input_tokens_details: { cached_tokens: number } };
  errors: { data: { code: string; message: string; line: number | null }[] } | null;
  input_file_id: string;
  output_file_id: string | null;
  error_file_id: string | null;
  wait_reason: string | null;
  metadata: Record<string, string> | null;
}

export interface BatchRow {
  batch: Batch;
  // Null where the list has only batches of the key's own tenant.
  tenant: string | null;
  key: string | null;
}

const CANCELLABLE = ["validating", "in_progress"];
const PROBLEMS_SHOWN = 3;

export const canCancel = (batch: Batch) => CANCELLABLE.includes(batch.status);

export const endOf = (batch: Batch) =>
  batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at ?? null;

export interface Lines {
  total: number;
  succeeded: number;
  // Of those that were run.
  failed: number;
  unexecuted: number;
}

// Lines that a cancelled or expired batch left have a result, which counts as failed.
export function linesOf({ request_counts: { total, completed, failed, unexecuted = 0 } }: Batch): Lines {
  return { total, succeeded: completed, failed: failed - unexecuted, unexecuted };
}

// How long it will take at the pace so far; null while that is not known.
export function leftSeconds(batch: Batch, nowS: number): number | null {
  const { total, succeeded, failed } = linesOf(batch);
  const done = succeeded + failed;
  if (batch.status !== "in_progress" || !batch.in_progress_at || !done || done >= total) return null;
  return ((nowS - batch.in_progress_at) / done) * (total - done);
}

// Lines with the same problem are named together.
export function problemsOf(batch: Batch): string[] {
  const found = new Map<string, (number | null)[]>();
  for (const { line, message } of batch.errors?.data ?? []) found.set(message, [...(found.get(message) ?? []), line]);
  return [...found].map(([message, lines]) => {
    if (!lines[0]) return message;
    if (lines.length === 1) return `line ${lines[0]}: ${message}`;
    const more = lines.length > PROBLEMS_SHOWN ? ` and ${count(lines.length - PROBLEMS_SHOWN)} more` : "";
    return `lines ${lines.slice(0, PROBLEMS_SHOWN).join(", ")}${more}: ${message}`;
  });
}

// Why it waits, or why it failed.
export function reasonOf(batch: Batch) {
  if (batch.wait_reason) return `Waits: ${batch.wait_reason}`;
  const problems = problemsOf(batch);
  const left = problems.length - PROBLEMS_SHOWN;
  const shown = problems.slice(0, PROBLEMS_SHOWN).join("; ");
  return left > 0 ? `${shown}; and ${count(left)} more problems` : shown;
}
