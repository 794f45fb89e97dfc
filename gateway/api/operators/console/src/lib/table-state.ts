// The place in a table: sort, filter and page, kept in the address, so that a link shows the same rows.
import { setQuery, useRoute } from "./route.ts";

export const PAGE_ROWS = 50;

export interface TableState {
  // Id of the column; "" is the order in which the rows come.
  sort: string;
  order: "asc" | "desc";
  search: string;
  // From 0.
  page: number;
  set: (change: Partial<Omit<TableState, "set">>) => void;
}

// id: prefix of the parameters, where a page has several tables. sort: a column, with - in front for descending.
export function useTableState(id = "", sort = ""): TableState {
  const { query } = useRoute();
  const name = (part: string) => (id ? `${id}.${part}` : part);
  const written = query.get(name("sort")) ?? sort;
  const state = {
    sort: written.replace(/^-/, ""),
    order: written.startsWith("-") ? ("desc" as const) : ("asc" as const),
    search: query.get(name("q")) ?? "",
    page: Math.max(0, Number.parseInt(query.get(name("page")) ?? "1", 10) - 1 || 0),
  };
  const set: TableState["set"] = (change) => {
    const next = { ...state, page: 0, ...change };
    const sorted = next.sort && `${next.order === "desc" ? "-" : ""}${next.sort}`;
    setQuery({
      [name("sort")]: sorted === sort ? null : sorted,
      [name("q")]: next.search || null,
      [name("page")]: next.page ? next.page + 1 : null,
    });
  };
  return { ...state, set };
}
