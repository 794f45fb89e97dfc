// Limits as rows of number, unit and window. errors: the server's words, by the limit's name.
import { Plus, Trash2 } from "lucide";
import { IN_FLIGHT, type LimitRow, nameOf, rowProblem, TWICE, UNITS, windowsOf } from "../lib/limits.ts";
import { Button } from "./button.tsx";

export interface LimitRowsProps {
  legend: string;
  rows: LimitRow[];
  onChange: (rows: LimitRow[]) => void;
  errors?: Record<string, string>;
  // Problems are shown after a first attempt to save.
  isChecked?: boolean;
  units?: string[];
  // Without a limit.
  note?: string;
}

const NEW: LimitRow = { amount: "", unit: "requests", window: "minute" };

const UNBOUNDED = "No limit: calls are bounded by the gateway alone.";
const ALL_UNITS = [...UNITS, IN_FLIGHT];

export function LimitRows({ legend, rows, onChange, errors = {}, isChecked, units = ALL_UNITS, note = UNBOUNDED }: LimitRowsProps) {
  const change = (at: number, part: Partial<LimitRow>) =>
    onChange(rows.map((row, index) => (index === at ? { ...row, ...part } : row)));
  return (
    <fieldset class="limit-rows">
      <legend>{legend}</legend>
      {!rows.length && <p class="note">{note}</p>}
      {rows.map((row, at) => {
        const problem = errors[nameOf(row)] ?? (isChecked ? rowProblem(row, rows) : null);
        const isTwice = problem === TWICE;
        return (
          <div class={`limit-row${problem ? " wrong" : ""}`} key={at}>
            <input
              aria-label={`Number of limit ${at + 1}`}
              aria-invalid={problem && !isTwice ? true : undefined}
              inputMode="decimal"
              placeholder="1,000"
              value={row.amount}
              onInput={(event) => change(at, { amount: event.currentTarget.value })}
            />
            <select
              aria-label={`Unit of limit ${at + 1}`}
              aria-invalid={isTwice || undefined}
              value={row.unit}
              onChange={(event) => {
                const unit = event.currentTarget.value;
                const windows = windowsOf(unit);
                const window = windows.includes(row.window) ? row.window : windows[1]!;
                change(at, { unit, window: unit === IN_FLIGHT ? "" : window });
              }}
            >
              {units.map((unit) => (
                <option key={unit} value={unit} selected={unit === row.unit}>
                  {unit.replaceAll("_", " ")}
                </option>
              ))}
            </select>
            {row.unit !== IN_FLIGHT && (
              <select
                aria-label={`Window of limit ${at + 1}`}
                aria-invalid={isTwice || undefined}
                value={row.window}
                onChange={(event) => change(at, { window: event.currentTarget.value })}
              >
                {windowsOf(row.unit).map((window) => (
                  <option key={window} value={window} selected={window === row.window}>
                    per {window}
                  </option>
                ))}
              </select>
            )}
            <Button
              kind="ghost"
              icon={Trash2}
              label={`Remove limit ${at + 1}`}
              onClick={() => onChange(rows.filter((_, index) => index !== at))}
            />
            {problem && (
              <p class="field-error" role="alert">
                {problem}
              </p>
            )}
          </div>
        );
      })}
      <Button isSmall icon={Plus} onClick={() => onChange([...rows, { ...NEW }])}>
        Add a limit
      </Button>
    </fieldset>
  );
}
