// A table whose rows come from the gateway one page at a time, in the order and with the filter of the address.
import { useRef } from "preact/hooks";
import type { Remote } from "../ui/table.tsx";
import { get, withQuery } from "./api.ts";
import { type Loaded, useLoad } from "./load.ts";
import { PAGE_ROWS, useTableState } from "./table-state.ts";

export const ALL_ROWS = 1000;
// A sort of ten thousand rows on a busy machine.
const READ_TIMEOUT_MS = 20_000;

export interface RemotePage<Row> {
  data: Row[];
  total: number;
}

type Query = Record<string, string | number | null | undefined>;

export interface RemoteTable<Row, Page extends RemotePage<Row>> extends Omit<Loaded<Page>, "content"> {
  page: Page | null;
  rows: Row[] | null;
  remote: Remote;
}

export interface RemoteOptions {
  // Prefix of the parameters in the address, where a page has several tables.
  id?: string;
  sort?: string;
  // Parameters of every request.
  query?: Query;
  refreshMs?: number | null;
}

// Reads all pages, the rows in the order of the table.
async function fetchAll<Row, Page extends RemotePage<Row>>(path: string, query: Query): Promise<Row[]> {
  const rows: Row[] = [];
  for (;;) {
    const page = await get<Page>(withQuery(path, { ...query, limit: ALL_ROWS, offset: rows.length }), 30_000);
    rows.push(...page.data);
    if (page.data.length < ALL_ROWS || rows.length >= page.total) return rows;
  }
}

export function useRemoteTable<Row, Page extends RemotePage<Row> = RemotePage<Row>>(path: string, options: RemoteOptions = {}): RemoteTable<Row, Page> {
  const { id = "", sort = "", query = {}, refreshMs = 15_000 } = options;
  const state = useTableState(id, sort);
  const chosen = { ...query, search: state.search, sort: state.sort, order: state.sort ? state.order : "" };
  const address = withQuery(path, { ...chosen, limit: PAGE_ROWS, offset: state.page * PAGE_ROWS });
  const { content, ...loaded } = useLoad(() => get<Page>(address, READ_TIMEOUT_MS), refreshMs, address);
  // The rows before stay in sight until those of another page are there: the field of the filter keeps the focus.
  const seen = useRef<Page | null>(null);
  if (content) seen.current = content;
  else if (loaded.problem) seen.current = null;
  const page = seen.current;
  const remote = { state, total: page?.total ?? 0, fetchAll: () => fetchAll<Row, Page>(path, chosen) };
  return { ...loaded, page, rows: page?.data ?? null, remote };
}
