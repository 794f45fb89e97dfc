// Parts that several pages use. Text from a server or a person is a child of an element, never markup.
import { useId, useState } from "preact/hooks";

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

// A table that is wider than the page scrolls by itself; the page does not.
export const Region = ({ label, id, children }) => (
  <div class="wide" role="region" tabIndex={0} aria-label={label} id={id}>
    {children}
  </div>
);

// columns: [name, kind]; a cell is a text or an element.
export function Table({ columns, rows, label, id, empty = "None yet." }) {
  if (!rows.length) {
    return (
      <div id={id}>
        <Note>{empty}</Note>
      </div>
    );
  }
  return (
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
          {rows.map((row) => (
            <tr>
              {row.map((value, index) => (
                <td class={columns[index][1] ?? ""}>{value}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Region>
  );
}

const GOOD = ["up", "ready", "running", "downloaded", "verified", "ok", "completed"];
const BAD = ["down", "refused", "unavailable", "failed", "expired"];

export function State({ value }) {
  const kind = GOOD.includes(value) ? "good" : BAD.includes(value) ? "bad" : "";
  return <span class={`state ${kind}`}>{value}</span>;
}

export const Answer = ({ id, action, children }) => (
  <div class="answer" id={id} aria-live="polite">
    {action.problem ? <p class="problem">{action.problem}</p> : children}
  </div>
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
