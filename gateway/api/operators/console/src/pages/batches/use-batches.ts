// The newest batches: of all tenants for operators, else those that the key may see. Older ones join by the button.
import { useRef, useState } from "preact/hooks";
import { get, withQuery } from "../../lib/api.ts";
import { useAction, useLoad } from "../../lib/load.ts";
import { useParam } from "../../lib/route.ts";
import { useAccess } from "../../shell/access.ts";
import type { Batch, BatchRow } from "./batch.ts";

const REFRESH_INTERVAL_MS = 2000;
const PAGE_BATCHES = 50;

interface BatchPage {
  rows: BatchRow[];
  hasMore: boolean;
}

async function readPage(isOwn: boolean, tenant: string, after: string | null): Promise<BatchPage> {
  if (isOwn) {
    const page = await get<{ data: Batch[]; has_more: boolean }>(withQuery("/v1/batches", { limit: PAGE_BATCHES, after }));
    return { rows: page.data.map((batch) => ({ batch, tenant: null, key: null })), hasMore: page.has_more };
  }
  const page = await get<{ data: BatchRow[]; has_more: boolean }>(
    withQuery("/admin/batches", { limit: PAGE_BATCHES, after, tenant: tenant || null }),
  );
  return { rows: page.data, hasMore: page.has_more };
}

export function useBatches() {
  const { isDenied: isOwn } = useAccess();
  const [tenant] = useParam("tenant");
  const subject = `${isOwn} ${tenant}`;
  // All batches that were listed, by id: a batch that leaves the newest page stays.
  const seen = useRef({ subject, rows: new Map<string, BatchRow>() });
  const [reached, setReached] = useState<{ subject: string; after: string; hasMore: boolean } | null>(null);
  const { content, problem, reload } = useLoad(() => readPage(isOwn, tenant, null), REFRESH_INTERVAL_MS, subject);
  if (seen.current.subject !== subject) seen.current = { subject, rows: new Map() };
  for (const row of content?.rows ?? []) seen.current.rows.set(row.batch.id, row);
  const place = reached?.subject === subject ? reached : null;
  const more = useAction(async () => {
    const page = await readPage(isOwn, tenant, place?.after ?? content?.rows.at(-1)?.batch.id ?? null);
    for (const row of page.rows) seen.current.rows.set(row.batch.id, row);
    setReached({ subject, after: page.rows.at(-1)?.batch.id ?? place?.after ?? "", hasMore: page.hasMore });
    return page;
  });
  const rows = content && [...seen.current.rows.values()].toSorted((one, other) => other.batch.created_at - one.batch.created_at);
  const hasMore = place ? place.hasMore : (content?.hasMore ?? false);
  return { isOwn, rows, hasMore, problem, more, reload };
}
