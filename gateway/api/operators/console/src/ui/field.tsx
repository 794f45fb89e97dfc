// One field of a form: label, what it means, and beside it the words of the server about its value.
import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface Described {
  label: string;
  hint?: ComponentChildren;
  error?: string | null;
}

interface Wiring {
  id: string;
  "aria-describedby"?: string;
  "aria-invalid"?: boolean;
}

function Field({ label, hint, error, children }: Described & { children: (wiring: Wiring) => ComponentChildren }) {
  const id = useId();
  const described = [hint ? `${id}-hint` : "", error ? `${id}-error` : ""].filter(Boolean).join(" ");
  return (
    <div class={`field${error ? " wrong" : ""}`}>
      <label for={id}>{label}</label>
      {children({ id, "aria-describedby": described || undefined, "aria-invalid": error ? true : undefined })}
      {hint && (
        <p class="note" id={`${id}-hint`}>
          {hint}
        </p>
      )}
      {error && (
        <p class="field-error" id={`${id}-error`} role="alert">
          {error}
        </p>
      )}
    </div>
  );
}

export interface TextFieldProps extends Described {
  value: string;
  onInput: (value: string) => void;
  type?: "text" | "password" | "search" | "number" | "date" | "url";
  placeholder?: string;
  autoFocus?: boolean;
  isRequired?: boolean;
  // Names that the browser offers.
  options?: string[];
  disabled?: boolean;
}

export function TextField(props: TextFieldProps) {
  const { value, onInput, type = "text", placeholder, autoFocus, isRequired, options, disabled, ...described } = props;
  return (
    <Field {...described}>
      {(wiring) => (
        <>
          <input
            {...wiring}
            type={type as "text"}
            value={value}
            placeholder={placeholder}
            autocomplete="off"
            autofocus={autoFocus}
            spellcheck={false}
            required={isRequired}
            disabled={disabled}
            dir="auto"
            list={options ? `${wiring.id}-list` : undefined}
            onInput={(event) => onInput(event.currentTarget.value)}
          />
          {options && (
            <datalist id={`${wiring.id}-list`}>
              {options.map((option) => (
                <option key={option} value={option} />
              ))}
            </datalist>
          )}
        </>
      )}
    </Field>
  );
}

export function TextArea({ value, onInput, rows = 4, ...described }: Described & { value: string; onInput: (value: string) => void; rows?: number }) {
  return (
    <Field {...described}>
      {(wiring) => (
        <textarea
          {...wiring}
          rows={rows}
          value={value}
          spellcheck={false}
          dir="auto"
          onInput={(event) => onInput(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

export interface SelectProps extends Described {
  value: string;
  onChange: (value: string) => void;
  options: (string | [value: string, title: string])[];
}

export function Select({ value, onChange, options, ...described }: SelectProps) {
  return (
    <Field {...described}>
      {(wiring) => (
        <select {...wiring} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
          {options.map((option) => {
            const [name, title] = typeof option === "string" ? [option, option] : option;
            return (
              <option key={name} value={name} selected={name === value}>
                {title}
              </option>
            );
          })}
        </select>
      )}
    </Field>
  );
}

export function Check({ label, checked, onChange, note }: { label: ComponentChildren; checked: boolean; onChange: (on: boolean) => void; note?: string }) {
  return (
    <label class="check">
      <input type="checkbox" checked={checked} onChange={(event) => onChange(event.currentTarget.checked)} />
      <span>
        {label}
        {note && <span class="note"> {note}</span>}
      </span>
    </label>
  );
}
