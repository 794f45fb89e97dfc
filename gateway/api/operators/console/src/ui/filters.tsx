// Filters of a list, in the address: texts, which apply a moment after the last letter, and switches.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useState } from "preact/hooks";
import { useParam } from "../lib/route.ts";

const TYPING_MS = 300;

export const Filters = ({ label, children }: { label: string; children: ComponentChildren }) => (
  <div class="filters" role="group" aria-label={label}>
    {children}
  </div>
);

export interface TextFilterProps {
  // Of the parameter in the address.
  name: string;
  label: string;
  placeholder?: string;
  // Values that the browser offers.
  options?: string[];
}

export function TextFilter({ name, label, placeholder, options = [] }: TextFilterProps) {
  const [value, set] = useParam(name);
  const [typed, setTyped] = useState(value);
  const id = useId();
  useEffect(() => setTyped(value), [value]);
  useEffect(() => {
    if (typed.trim() === value) return undefined;
    const timer = setTimeout(() => set(typed.trim()), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  return (
    <div class="filter">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="search"
        value={typed}
        placeholder={placeholder ?? "all"}
        autocomplete="off"
        spellcheck={false}
        dir="auto"
        list={options.length ? `${id}-list` : undefined}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Enter" && set(typed.trim())}
      />
      {options.length > 0 && (
        <datalist id={`${id}-list`}>
          {options.map((option) => (
            <option key={option} value={option} />
          ))}
        </datalist>
      )}
    </div>
  );
}

// options: values with their titles; the first is the default, which the address leaves out.
export function ChoiceFilter({ name, label, options }: { name: string; label: string; options: [string, string][] }) {
  const fallback = options[0]?.[0] ?? "";
  const [value, set] = useParam(name, fallback);
  const id = useId();
  return (
    <div class="filter">
      <label for={id}>{label}</label>
      <select id={id} value={value} onChange={(event) => set(event.currentTarget.value)}>
        {options.map(([option, title]) => (
          <option key={option} value={option} selected={option === value}>
            {title}
          </option>
        ))}
      </select>
    </div>
  );
}

export function SwitchFilter({ name, label }: { name: string; label: string }) {
  const [value, set] = useParam(name);
  return (
    <label class="filter-switch">
      <input type="checkbox" checked={value !== ""} onChange={(event) => set(event.currentTarget.checked ? "true" : "")} />
      {label}
    </label>
  );
}
