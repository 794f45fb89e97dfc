// What a request carries: one tab for each type of content.
import { useState } from "preact/hooks";
import { Tabs } from "../ui/tabs.tsx";
import type { Operation } from "./document.ts";
import { bodyOf } from "./request.ts";
import type { Schemas } from "./schema.ts";
import { Shape } from "./shape.tsx";

// Media types as a person names them.
export const nameOfType = (type: string) =>
  ({ "application/json": "JSON", "application/vnd.apache.arrow.stream": "Arrow", "application/octet-stream": "Bytes", "multipart/form-data": "Form" })[type] ?? type;

export function Body({ operation, schemas }: { operation: Operation; schemas: Schemas }) {
  const content = bodyOf(operation);
  const types = Object.keys(content);
  const [chosen, setChosen] = useState(types[0] ?? "");
  const schema = content[chosen]?.schema;
  if (!types.length || !schema) return null;
  return (
    <section aria-label="Body">
      <div class="section-head">
        <h2>Body</h2>
        {types.length > 1 ? (
          <Tabs label="Type of the body" tabs={types.map((name) => ({ name, title: nameOfType(name) }))} chosen={chosen} onChoose={setChosen} />
        ) : (
          <span class="note">{nameOfType(chosen)}</span>
        )}
      </div>
      <Shape schema={schema} schemas={schemas} isAnswer={false} />
    </section>
  );
}
