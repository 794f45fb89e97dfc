// One field of an upstream's form, by its kind.
import { Check, Select, TextArea, TextField } from "../../ui/field.tsx";
import type { FormField } from "./form.ts";

export interface UpstreamFieldProps {
  field: FormField;
  backend: string;
  value: string;
  error: string | null;
  onInput: (text: string) => void;
}

export function UpstreamField({ field, backend, value, error, onInput }: UpstreamFieldProps) {
  const described = { label: field.label(backend), hint: field.hint?.(backend), error };
  if (field.kind === "lines") return <TextArea {...described} value={value} onInput={onInput} rows={2} />;
  if (field.kind === "choice") return <Select {...described} value={value} onChange={onInput} options={field.options ?? []} />;
  if (field.kind === "check") {
    return (
      <div>
        <Check label={described.label} checked={value !== ""} onChange={(on) => onInput(on ? "on" : "")} />
        {error && (
          <p class="field-error" role="alert">
            {error}
          </p>
        )}
      </div>
    );
  }
  return <TextField {...described} type={field.kind === "number" ? "number" : "text"} value={value} onInput={onInput} />;
}
