// One operation: its paths, what it takes and answers, a form that sends it, and code that does the same.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Code } from "../ui/code.tsx";
import { CopyButton } from "../ui/copy-button.tsx";
import { addressOf, readPlace } from "./address.ts";
import { Answers } from "./answers.tsx";
import { Body } from "./body.tsx";
import type { ApiDocument, Operation } from "./document.ts";
import { FieldRow } from "./fields.tsx";
import { Method } from "./method.tsx";
import { draftOf, parametersOf, requestOf } from "./request.ts";
import { samplesOf } from "../lib/samples/samples.ts";
import { Inline, Text } from "./text.tsx";
import { TryOut } from "./try-out.tsx";

export interface OperationProps {
  api: ApiDocument;
  operation: Operation;
  // Of its paths, the one that the address names.
  path: string;
  base: string;
}

let isFirst = true;

export function OperationView({ api, operation, path, base }: OperationProps) {
  const { schemas } = api.components;
  const { raw, method } = operation;
  const [draft, setDraft] = useState(() => draftOf(operation, path, schemas));
  const samples = useMemo(() => samplesOf(requestOf(operation, draft, base, true)), [operation, draft, base]);
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    // People who use a screen reader hear that the page has changed.
    if (!isFirst) heading.current?.focus({ preventScroll: true });
    isFirst = false;
    scrollTo(0, 0);
  }, []);
  const parameters = parametersOf(operation, path);
  const others = operation.aliases.filter((alias) => alias !== path);
  return (
    <article class="operation">
      <header class="page-head">
        <div class="page-title">
          <p class="note">{operation.tag}</p>
          <h1 tabIndex={-1} ref={heading}>
            <Inline text={raw.summary} />
          </h1>
          <p class="path-line">
            <Method name={method} /> <code dir="ltr">{path}</code>
            <CopyButton text={base + path} label="Copy the address" />
          </p>
          {others.length > 0 && (
            <details class="aliases" open={others.length < 4}>
              <summary>The same at {others.length === 1 ? "one other path" : `${others.length} other paths`}</summary>
              <ul class="plain-list">
                {others.map((alias) => (
                  <li key={alias}>
                    <a class="mono" dir="ltr" href={addressOf({ id: method + alias, query: readPlace().query })}>
                      {alias}
                    </a>
                  </li>
                ))}
              </ul>
            </details>
          )}
        </div>
      </header>
      <div class="operation-columns">
        <div class="operation-text">
          <Text text={raw.description && raw.description !== `${raw.summary}.` ? raw.description : ""} />
          {!operation.needsKey && <p class="note">Needs no key.</p>}
          {parameters.length > 0 && (
            <section aria-label="Parameters">
              <h2>Parameters</h2>
              <ul class="fields-tree">
                {parameters.map((parameter) => (
                  <FieldRow
                    key={parameter.in + parameter.name}
                    name={parameter.name}
                    schema={{ ...parameter.schema, description: parameter.description ?? parameter.schema.description }}
                    isRequired={Boolean(parameter.required)}
                    schemas={schemas}
                    note={`in the ${parameter.in}`}
                    isAnswer={false}
                  />
                ))}
              </ul>
            </section>
          )}
          <Body operation={operation} schemas={schemas} />
          <Answers api={api} operation={operation} />
        </div>
        <div class="operation-side">
          <TryOut operation={operation} draft={draft} onChange={setDraft} base={base} schemas={schemas} />
          <section class="card" aria-label="Code">
            <h2>Code</h2>
            <Code samples={samples} />
          </section>
        </div>
      </div>
    </article>
  );
}
