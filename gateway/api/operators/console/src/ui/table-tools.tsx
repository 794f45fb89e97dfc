// Above a table: filter, place, pages, export. On a phone, where there are no titles of columns, also the order.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ChevronLeft, ChevronRight, Download, Search } from "lucide";
import { count } from "../lib/format.ts";
import { PAGE_ROWS, type TableState } from "../lib/table-state.ts";
import { Button } from "./button.tsx";
import { Icon } from "./icon.tsx";

const TYPING_MS = 250;

export interface TableToolsProps {
  label: string;
  state: TableState;
  total: number;
  last: number;
  isSearched: boolean;
  onExport?: () => void;
  isExporting?: boolean;
  children?: ComponentChildren;
}

export function TableTools({ label, state, total, last, isSearched, onExport, isExporting, children }: TableToolsProps) {
  const [typed, setTyped] = useState(state.search);
  // The order may be chosen before the letters apply, and must not be lost by them.
  const latest = useRef(state);
  latest.current = state;
  useEffect(() => setTyped(state.search), [state.search]);
  useEffect(() => {
    if (typed === state.search) return undefined;
    const timer = setTimeout(() => latest.current.set({ search: typed }), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const start = state.page * PAGE_ROWS;
  const place = `${count(start + 1)}–${count(Math.min(total, start + PAGE_ROWS))} of ${count(total)}`;
  if (!isSearched && !children && !onExport) return null;
  return (
    <div class={`table-tools${isSearched || children ? "" : " slim"}`}>
      {isSearched && (
        <div class="search">
          <Icon of={Search} size={15} />
          <input
            type="search"
            aria-label={`Filter: ${label}`}
            placeholder="Filter"
            value={typed}
            autocomplete="off"
            spellcheck={false}
            dir="auto"
            onInput={(event) => setTyped(event.currentTarget.value)}
          />
        </div>
      )}
      {children}
      <div class="table-place">
        <span class="note" role="status">
          {last > 0 ? place : total === 1 ? "1 row" : `${count(total)} rows`}
        </span>
        {last > 0 && (
          <>
            <Button
              kind="ghost"
              isSmall
              icon={ChevronLeft}
              label="Previous page"
              disabled={!state.page}
              onClick={() => state.set({ page: state.page - 1 })}
            />
            <Button
              kind="ghost"
              isSmall
              icon={ChevronRight}
              label="Next page"
              disabled={state.page >= last}
              onClick={() => state.set({ page: state.page + 1 })}
            />
          </>
        )}
        {onExport && (
          <Button kind="ghost" isSmall icon={Download} label="Save as CSV" busy={isExporting} onClick={onExport} />
        )}
      </div>
    </div>
  );
}
