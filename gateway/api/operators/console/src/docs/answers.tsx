// The answers of an operation by status: the fields of each, an example, and the kinds of errors behind a status.
import { useState } from "preact/hooks";
import type { Answer, ApiDocument, Operation } from "./document.ts";
import { nameOfType } from "./body.tsx";
import { choicesOf, exampleOf, nameOf } from "./schema.ts";
import { Shape } from "./shape.tsx";
import { jsonText } from "./json-text.ts";
import { Inline } from "./text.tsx";

const toneOf = (status: string) => (status < "3" ? "good" : status < "4" ? "info" : status < "5" ? "warn" : "bad");

// "Conflict: `already_exists`" → its phrase and its kinds.
function partsOf({ description }: Answer, api: ApiDocument): [string, string[]] {
  const [phrase = "", rest = ""] = description.split(/: (?=`)/);
  const kinds = [...rest.matchAll(/`(\w+)`/g)].map(([, kind = ""]) => kind).filter((kind) => kind in api["x-error-kinds"]);
  return [kinds.length ? phrase : description, kinds];
}

export function Answers({ api, operation }: { api: ApiDocument; operation: Operation }) {
  const statuses = Object.entries(operation.raw.responses).sort(([one], [other]) => one.localeCompare(other));
  return (
    <section aria-label="Answers">
      <h2>Answers</h2>
      <div class="answers">
        {statuses.map(([status, answer]) => (
          <StatusRow key={status} api={api} status={status} answer={answer} />
        ))}
      </div>
    </section>
  );
}

function StatusRow({ api, status, answer }: { api: ApiDocument; status: string; answer: Answer }) {
  const [isOpen, setOpen] = useState(status.startsWith("2"));
  const [phrase, kinds] = partsOf(answer, api);
  return (
    <details open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span class={`status tone-${toneOf(status)}`}>{status}</span>
        <span class="status-text">
          <Inline text={phrase} />
          {kinds.length > 0 && <span class="note kinds"> {kinds.join(", ")}</span>}
        </span>
      </summary>
      {isOpen && <AnswerContent api={api} answer={answer} kinds={kinds} />}
    </details>
  );
}

function AnswerContent({ api, answer, kinds }: { api: ApiDocument; answer: Answer; kinds: string[] }) {
  const { schemas } = api.components;
  const contents = Object.entries(answer.content ?? {});
  if (!contents.length && !kinds.length) return <p class="note">The body is empty.</p>;
  return (
    <div class="answer-content">
      {kinds.length > 0 && (
        <ul class="plain-list kinds-list">
          {kinds.map((kind) => (
            <li key={kind}>
              <code>{kind}</code> <Inline text={api["x-error-kinds"][kind]?.meaning ?? ""} />
              {api["x-error-kinds"][kind]?.retryable && <span class="note"> A retry may help.</span>}
            </li>
          ))}
        </ul>
      )}
      {contents.map(([type, { schema, example }]) => {
        if (!schema) return null;
        const names = choicesOf(schema).map(nameOf);
        const bodies = names.map((name) => api["x-error-bodies"][name]?.[kinds[0] ?? ""]).filter((body) => body !== undefined);
        const shown = bodies.length ? bodies : type === "application/json" ? [example ?? exampleOf(schema, schemas)] : [];
        return (
          <div key={type}>
            {contents.length > 1 && <h3>{nameOfType(type)}</h3>}
            <Shape schema={schema} schemas={schemas} isAnswer />
            {shown.map((body, index) => (
              <pre key={index} tabIndex={0} aria-label="Example">
                {jsonText(body)}
              </pre>
            ))}
          </div>
        );
      })}
    </div>
  );
}
