// The form of a body or an answer: its type, and the fields of each object that it may be.
import type { Schema } from "./document.ts";
import { FieldTree } from "./fields.tsx";
import { objectsOf, resolve, type Schemas, typeOf } from "./schema.ts";
import { Inline } from "./text.tsx";

export function Shape({ schema, schemas, isAnswer }: { schema: Schema; schemas: Schemas; isAnswer: boolean }) {
  const objects = objectsOf(schema, schemas);
  const description = resolve(schema, schemas).description;
  const isPlainObject = objects.length === 1 && schema.$ref !== undefined;
  return (
    <>
      {!isPlainObject && (
        <p class="note">
          <span class="field-type">{typeOf(schema, schemas)}</span>
        </p>
      )}
      {!objects.length && description && (
        <p class="meaning">
          <Inline text={description} />
        </p>
      )}
      {objects.map(([name, object]) => (
        <section key={name} aria-label={name || "Fields"}>
          {!isPlainObject && <h3 class="mono">{name}</h3>}
          <FieldTree schema={object} schemas={schemas} isAnswer={isAnswer} />
        </section>
      ))}
    </>
  );
}
