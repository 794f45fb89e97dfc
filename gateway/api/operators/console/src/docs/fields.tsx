// The fields of an object as a tree: name, type, what it means, and the fields of objects inside, which unfold.
import { useState } from "preact/hooks";
import type { Schema } from "./document.ts";
import { boundsOf, defaultOf, fieldsOf, isNullable, objectsOf, resolve, type Schemas, typeOf, valuesOf } from "./schema.ts";
import { Inline } from "./text.tsx";

// Lists of allowed values that are longer than this fold.
const VALUES_SHOWN = 8;

function Values({ values }: { values: unknown[] }) {
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole ? values : values.slice(0, VALUES_SHOWN);
  return (
    <p class="note values">
      {values.length > 1 ? "one of " : "always "}
      {shown.map((value) => (
        <>
          <code key={String(value)}>{JSON.stringify(value)}</code>{" "}
        </>
      ))}
      {values.length > VALUES_SHOWN && (
        <button type="button" class="link" aria-expanded={isWhole} onClick={() => setWhole(!isWhole)}>
          {isWhole ? "show fewer" : `and ${values.length - VALUES_SHOWN} more`}
        </button>
      )}
    </p>
  );
}

export interface FieldProps {
  name: string;
  schema: Schema;
  isRequired: boolean;
  schemas: Schemas;
  // Fields of answers are not required of anybody.
  isAnswer: boolean;
  note?: string;
}

export function FieldRow({ name, schema, isRequired, schemas, isAnswer, note }: FieldProps) {
  const { text, value } = defaultOf(schema);
  const meaning = text || resolve(schema, schemas).description || "";
  const values = valuesOf(schema, schemas);
  const objects = objectsOf(schema, schemas);
  const facts = [...boundsOf(schema), ...(isNullable(schema) && isAnswer ? ["may be null"] : []), ...(note ? [note] : [])];
  return (
    <li class="field-row">
      <div class="field-head">
        <code class="field-name">{name}</code>
        <span class="field-type">{typeOf(schema, schemas)}</span>
        {isRequired && !isAnswer && <span class="required">required</span>}
        {facts.map((fact) => (
          <span class="fact" key={fact}>
            {fact}
          </span>
        ))}
        {value !== null && !isAnswer && (
          <span class="fact">
            default <code>{value}</code>
          </span>
        )}
      </div>
      {meaning && (
        <p class="meaning">
          <Inline text={meaning} />
        </p>
      )}
      {values.length > 0 && <Values values={values} />}
      {objects.map(([title, object]) => (
        <Nested key={title} title={title} object={object} schemas={schemas} isAnswer={isAnswer} of={name} />
      ))}
    </li>
  );
}

// Rendered when it is unfolded, because a schema may contain itself.
function Nested({ title, object, schemas, isAnswer, of }: { title: string; object: Schema; schemas: Schemas; isAnswer: boolean; of: string }) {
  const [isOpen, setOpen] = useState(false);
  const count = fieldsOf(object, schemas).length;
  return (
    <div class="nested">
      <button type="button" class="link" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
        {isOpen ? "▾" : "▸"} {count === 1 ? "one field" : `${count} fields`} of {title || of}
      </button>
      {isOpen && <FieldTree schema={object} schemas={schemas} isAnswer={isAnswer} />}
    </div>
  );
}

export function FieldTree({ schema, schemas, isAnswer }: { schema: Schema; schemas: Schemas; isAnswer: boolean }) {
  return (
    <ul class="fields-tree">
      {fieldsOf(schema, schemas).map((field) => (
        <FieldRow key={field.name} {...field} schemas={schemas} isAnswer={isAnswer} />
      ))}
    </ul>
  );
}
