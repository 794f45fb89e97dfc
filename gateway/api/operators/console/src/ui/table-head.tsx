// The titles of a table's columns: a click sorts, another turns the order around.
import { ArrowDown, ArrowUp, ChevronsUpDown } from "lucide";
import type { TableState } from "../lib/table-state.ts";
import { Icon } from "./icon.tsx";
import type { Column } from "./table.tsx";

export function TableHead<Row>({ columns, state }: { columns: Column<Row>[]; state: TableState }) {
  return (
    <thead>
      <tr>
        {columns.map(({ id, title, value, kind = "text", isSorted = true }) => {
          const isChosen = state.sort === id;
          // Numbers are asked for from the largest.
          const first = kind === "number" ? "desc" : "asc";
          const turned = state.order === "asc" ? "desc" : "asc";
          const order = isChosen ? turned : first;
          return (
            <th
              key={id}
              scope="col"
              class={kind}
              aria-sort={isChosen ? (state.order === "asc" ? "ascending" : "descending") : undefined}
            >
              {value && isSorted ? (
                <button type="button" class="sort" onClick={() => state.set({ sort: id, order })}>
                  {title}
                  <Icon of={isChosen ? (state.order === "asc" ? ArrowUp : ArrowDown) : ChevronsUpDown} size={13} />
                </button>
              ) : (
                title || <span class="unseen">Actions</span>
              )}
            </th>
          );
        })}
      </tr>
    </thead>
  );
}
