// Pages of records that the filters select, which the button for older ones joins.
import { useEffect, useState } from "preact/hooks";
import { useAction, useLoad } from "../../lib/load.ts";
import { useRoute } from "../../lib/route.ts";
import { type AuditFilter, type AuditPage, type AuditRecord, readPage } from "./record.ts";

const FILTERS = ["object", "actor", "action", "since", "search"];
const EXPORT_PAGE = 1000;
const EXPORT_MAX = 20_000;
const REFRESH_INTERVAL_MS = 15_000;

export function useRecords() {
  const { query } = useRoute();
  const filter: AuditFilter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]));
  const subject = JSON.stringify(filter);
  const [older, setOlder] = useState<{ subject: string; records: AuditRecord[]; next: string | null } | null>(null);
  // Once older records are shown, the newest page stays too: its end is where they begin.
  const isExtended = older?.subject === subject;
  const newest = useLoad<AuditPage>(() => readPage(filter, null), isExtended ? null : REFRESH_INTERVAL_MS, subject);
  const [kept, setKept] = useState<{ subject: string; page: AuditPage } | null>(null);
  useEffect(() => {
    if (newest.content && !isExtended) setKept({ subject, page: newest.content });
  }, [newest.content]);
  const first = isExtended && kept?.subject === subject ? kept.page : newest.content;
  const next = isExtended ? older.next : (first?.next ?? null);
  const more = useAction(async () => {
    const page = await readPage(filter, next);
    const before = isExtended ? older.records : [];
    setOlder({ subject, records: [...before, ...page.data], next: page.next });
    return page;
  });
  // All records that the filters select, up to a bound.
  const readAll = async () => {
    const found: AuditRecord[] = [];
    let cursor: string | null = null;
    do {
      const page: AuditPage = await readPage(filter, cursor, EXPORT_PAGE);
      found.push(...page.data);
      cursor = page.next;
    } while (cursor && found.length < EXPORT_MAX);
    return found;
  };
  const records = first ? [...first.data, ...(isExtended ? older.records : [])] : null;
  const reload = () => {
    setOlder(null);
    newest.reload();
  };
  return { records, next, problem: newest.problem ?? more.problem, more, readAll, reload };
}
