// The fields of a form with files.
import { useId } from "preact/hooks";
import { Select, TextField } from "../ui/field.tsx";
import type { Schema } from "./document.ts";
import type { Form } from "./request.ts";
import { typeOf, valuesOf } from "./schema.ts";

export function FormFields({ schema, form, onChange }: { schema: Schema; form: Form; onChange: (form: Form) => void }) {
  const id = useId();
  const set = (name: string, value: string | File) => onChange({ ...form, [name]: value });
  return (
    <>
      {Object.entries(schema.properties ?? {}).map(([name, member]) => {
        const label = schema.required?.includes(name) ? `${name} (required)` : name;
        if (typeOf(member, {}) === "file") {
          return (
            <div class="field" key={name}>
              <label for={`${id}-${name}`}>{label}</label>
              <input id={`${id}-${name}`} type="file" onChange={(event) => set(name, event.currentTarget.files?.[0] ?? "")} />
            </div>
          );
        }
        const value = typeof form[name] === "string" ? form[name] : "";
        const values = valuesOf(member, {}).map(String);
        if (values.length) return <Select key={name} label={label} value={value} onChange={(text) => set(name, text)} options={["", ...values]} />;
        return <TextField key={name} label={label} value={value} onInput={(text) => set(name, text)} />;
      })}
    </>
  );
}
