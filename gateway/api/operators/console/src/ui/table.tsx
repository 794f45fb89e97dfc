// A table that sorts, filters, has pages, exports CSV, and keeps its place in the address. On a phone each row is a
// card. Rows come whole, or one page at a time from the gateway (`remote`).
import type { ComponentChildren } from "preact";
import { csvOf, saveFile } from "../lib/csv.ts";
import { useAction } from "../lib/load.ts";
import { PAGE_ROWS, type TableState, useTableState } from "../lib/table-state.ts";
import { Clip } from "./clip.tsx";
import { Empty, type EmptyProps, Failure, Skeleton } from "./states.tsx";
import { TableHead } from "./table-head.tsx";
import { TableTools } from "./table-tools.tsx";

export type Value = string | number | null;

export interface Column<Row> {
  // Of `sort` in the address and for the gateway.
  id: string;
  // "" for buttons.
  title: string;
  // What sorts, filters and is exported. Without it the column is for buttons.
  value?: (row: Row) => Value;
  show?: (row: Row) => ComponentChildren;
  // long: it takes the space that is left, and its end is cut.
  // hidden: it is only exported.
  kind?: "text" | "number" | "long" | "actions" | "hidden";
  isSorted?: boolean;
}

export interface Remote {
  state: TableState;
  total: number;
  // All rows, for CSV.
  fetchAll?: () => Promise<unknown[]>;
}

export interface TableProps<Row> {
  label: string;
  columns: Column<Row>[];
  // Null while they are read.
  rows: Row[] | null;
  rowKey: (row: Row) => string;
  // Of the parameters in the address, where a page has several tables.
  id?: string;
  sort?: string;
  empty?: EmptyProps;
  remote?: Remote;
  // Name of the CSV file; without one there is no export.
  file?: string;
  // Rows that are exported, where there are more than those here.
  exported?: () => Promise<Row[]>;
  // Whether it has a filter for text; by itself from nine rows on.
  isSearched?: boolean;
  // All rows on one page.
  isWhole?: boolean;
  // Opens a row; the first column should have a link or button for the same.
  onOpen?: (row: Row) => void;
  tools?: ComponentChildren;
  isSelected?: (row: Row) => boolean;
}

function compare(one: Value, other: Value) {
  if (one === other) return 0;
  if (one === null) return 1;
  if (other === null) return -1;
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one).localeCompare(String(other), "en", { numeric: true, sensitivity: "base" });
}

function sortedRows<Row>(rows: Row[], columns: Column<Row>[], { sort, order, search }: TableState) {
  const sought = search.trim().toLocaleLowerCase();
  const has = (row: Row) =>
    columns.some(({ value }) => String(value?.(row) ?? "").toLocaleLowerCase().includes(sought));
  const found = sought ? rows.filter(has) : rows;
  const value = columns.find(({ id }) => id === sort)?.value;
  if (!value) return found;
  const sign = order === "desc" ? -1 : 1;
  // Rows without a value are last in either order.
  return found.toSorted((one, other) => {
    const [first, second] = [value(one), value(other)];
    return first === null || second === null ? compare(first, second) : sign * compare(first, second);
  });
}

function Cell<Row>({ column, row }: { column: Column<Row>; row: Row }) {
  const { show, value, kind = "text", title } = column;
  const plain = value?.(row) ?? null;
  return (
    <td class={kind} data-label={title}>
      {show ? show(row) : plain === null ? "–" : typeof plain === "number" ? plain.toLocaleString("en") : <Clip text={plain} />}
    </td>
  );
}

export function Table<Row>(props: TableProps<Row>) {
  const { label, columns, rows, rowKey, id = "", sort = "", empty, remote, file, onOpen, tools, isSelected } = props;
  const { exported, isSearched, isWhole } = props;
  const own = useTableState(id, sort);
  const state = remote?.state ?? own;
  const saving = useAction(async (save: () => Promise<void>) => save());
  if (!rows) return <Skeleton rows={6} height={28} />;
  const found = remote ? rows : sortedRows(rows, columns, state);
  const total = remote?.total ?? found.length;
  const last = isWhole ? 0 : Math.max(0, Math.ceil(total / PAGE_ROWS) - 1);
  const page = Math.min(state.page, last);
  const shown = remote ? rows : isWhole ? found : found.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS);
  const isFiltered = state.search.trim() !== "";
  if (!total && !isFiltered) return <Empty title="Nothing here yet" {...empty} />;
  const values = columns.filter((column) => column.value && column.title);
  const visible = columns.filter(({ kind }) => kind !== "hidden");
  const exportAll = async () => {
    const all = exported ? await exported() : remote?.fetchAll ? ((await remote.fetchAll()) as Row[]) : found;
    const text = csvOf([values.map(({ title }) => title), ...all.map((row) => values.map(({ value }) => value!(row)))]);
    saveFile(text, "text/csv", `${file}.csv`);
  };
  return (
    <div class="table-box" id={id ? `table-${id}` : undefined}>
      <TableTools
        label={label}
        state={{ ...state, page }}
        total={total}
        last={last}
        isSearched={isSearched ?? (Boolean(remote) || rows.length > 8 || isFiltered)}
        onExport={file ? () => void saving.run(exportAll) : undefined}
        isExporting={saving.busy}
      >
        {tools}
      </TableTools>
      <Failure problem={saving.problem} />
      {shown.length ? (
        <div class="scroll" role="region" aria-label={label} tabIndex={0}>
          <table>
            <TableHead columns={visible} state={state} />
            <tbody>
              {shown.map((row) => (
                <tr
                  key={rowKey(row)}
                  class={`${onOpen ? "opens" : ""}${isSelected?.(row) ? " selected" : ""}`}
                  onClick={(event) => {
                    const target = event.target as HTMLElement;
                    if (onOpen && !target.closest("a, button, input, select, label")) onOpen(row);
                  }}
                >
                  {visible.map((column) => (
                    <Cell key={column.id} column={column} row={row} />
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <Empty title={`Nothing contains “${state.search}”`}>Clear the filter to see all rows.</Empty>
      )}
    </div>
  );
}
