// Parts that several pages use. Text from a server or a person is a child of an element, never markup.
import { useId, useState } from "preact/hooks";
import { count } from "./format.js";

// Rows that a table shows at once. A longer one has pages and a filter.
const PAGE_ROWS = 50;

export const Note = ({ children, id }) => (
  <p class="note" id={id}>
    {children}
  </p>
);

export const Problem = ({ children, id }) =>
  children ? (
    <p class="problem" role="alert" id={id}>
      {children}
    </p>
  ) : null;

// Why a request has failed. isPlain: that is no error, but how the gateway is set up.
export const Failure = ({ problem, id, isPlain = problem?.isKeyMissing }) =>
  problem && isPlain ? <Note id={id}>{problem.message}</Note> : <Problem id={id}>{problem?.message}</Problem>;

// A table that is wider than the page scrolls by itself; the page does not.
export const Region = ({ label, id, children }) => (
  <div class="wide" role="region" tabIndex={0} aria-label={label} id={id}>
    {children}
  </div>
);

// The text of a cell, for the filter: what it shows, or the value of the element that shows it.
const textOf = (cell) => (typeof cell === "object" ? String(cell?.props?.value ?? "") : String(cell ?? ""));

// The page of the rows that contain the filter's text.
function usePages(rows) {
  const [filter, setFilter] = useState("");
  const [wanted, setWanted] = useState(0);
  const sought = filter.trim().toLowerCase();
  const found = sought ? rows.filter((row) => row.some((cell) => textOf(cell).toLowerCase().includes(sought))) : rows;
  const last = Math.max(0, Math.ceil(found.length / PAGE_ROWS) - 1);
  const page = Math.min(wanted, last);
  const start = page * PAGE_ROWS;
  const shown = found.slice(start, start + PAGE_ROWS);
  const place = found.length ? `${count(start + 1)}–${count(start + shown.length)} of ${count(found.length)}` : "none";
  const change = (text) => {
    setFilter(text);
    setWanted(0);
  };
  return { shown, filter, change, place, page, last, go: setWanted };
}

function Pager({ label, pages }) {
  const id = useId();
  return (
    <div class="row pager">
      <TextField label={`Filter: ${label}`} id={id} value={pages.filter} onInput={pages.change} />
      <button type="button" class="quiet" disabled={!pages.page} onClick={() => pages.go(pages.page - 1)}>
        Previous
      </button>
      <button type="button" class="quiet" disabled={pages.page === pages.last} onClick={() => pages.go(pages.page + 1)}>
        Next
      </button>
      <span class="note" role="status">
        {pages.place}
      </span>
    </div>
  );
}

// columns: [name, kind]; a cell is a text or an element.
export function Table({ columns, rows, label, id, empty = "None yet." }) {
  const pages = usePages(rows);
  if (!rows.length) {
    return (
      <div id={id}>
        <Note>{empty}</Note>
      </div>
    );
  }
  return (
    <>
      {rows.length > PAGE_ROWS && <Pager label={label} pages={pages} />}
      <Region label={label} id={id}>
        <table>
          <thead>
            <tr>
              {columns.map(([name, kind]) => (
                <th scope="col" class={kind === "number" || kind === "bar" ? kind : ""}>
                  {name || <span class="unseen">Actions</span>}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {pages.shown.map((row) => (
              <tr>
                {row.map((value, index) => (
                  <td class={columns[index][1] ?? ""}>{value}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Region>
    </>
  );
}

const GOOD = ["up", "ready", "running", "downloaded", "verified", "ok", "fits", "serving", "completed"];
const BAD = ["down", "refused", "unavailable", "canary_only", "failed", "differs", "withdrawn", "expired", "not defined"];

export function State({ value }) {
  const kind = GOOD.includes(value) ? "good" : BAD.includes(value) ? "bad" : "";
  return <span class={`state ${kind}`}>{value}</span>;
}

// The outcome of an action. said: what a screen reader announces in place of a long outcome, null before there is one.
export const Answer = ({ id, action, said, children }) => (
  <>
    <p class="unseen" role="status">
      {action.busy ? "Working …" : !action.problem && said}
    </p>
    <div class="answer" id={id} aria-live={said === undefined ? "polite" : undefined} aria-busy={action.busy}>
      {action.problem ? (
        <p class="problem" role={said === undefined ? undefined : "alert"}>
          {action.problem}
        </p>
      ) : (
        children
      )}
    </div>
  </>
);

export function TextField({ label, id, value, onInput, type = "text", note, ...rest }) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <input
        id={id}
        type={type}
        value={value}
        onInput={(event) => onInput(event.currentTarget.value)}
        autocomplete="off"
        spellcheck={false}
        {...rest}
      />
      {note && <Note>{note}</Note>}
    </div>
  );
}

export function TextArea({ label, id, value, onInput, rows = 4, note }) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <textarea id={id} rows={rows} value={value} onInput={(event) => onInput(event.currentTarget.value)} spellcheck={false} />
      {note && <Note>{note}</Note>}
    </div>
  );
}

export function Select({ label, id, value, onChange, options }) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <select id={id} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map((option) => (
          <option value={option} selected={option === value}>
            {option}
          </option>
        ))}
      </select>
    </div>
  );
}

// Copies a text. Where the browser offers no clipboard (plain HTTP on another machine) the text is selected.
export function CopyButton({ text, target }) {
  const [done, setDone] = useState("");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      setDone("copied");
    } catch {
      getSelection().selectAllChildren(document.getElementById(target));
      setDone("selected; press Ctrl+C");
    }
  }
  return (
    <>
      <button type="button" class="quiet" onClick={copy}>
        Copy
      </button>{" "}
      <span class="note" role="status">
        {done}
      </span>
    </>
  );
}

export function Code({ samples }) {
  const id = useId();
  const languages = Object.keys(samples);
  const [language, setLanguage] = useState(languages[0]);
  return (
    <details class="code">
      <summary>Code of this call</summary>
      <div class="row">
        <Select label="Language" id={`${id}-language`} value={language} onChange={setLanguage} options={languages} />
        <CopyButton text={samples[language]} target={`${id}-code`} />
      </div>
      <pre id={`${id}-code`} tabIndex={0}>
        {samples[language]}
      </pre>
    </details>
  );
}

export function ask(question, action) {
  return () => {
    if (confirm(question)) action();
  };
}
