// What a key may do: all operations, or the scopes that are checked.
import { useId } from "preact/hooks";
import { Check } from "../../ui/field.tsx";

const SCOPES: [name: string, meaning: string][] = [
  ["embed", "Embeddings of texts, pictures and recordings."],
  ["rerank", "Rerank of texts and pictures."],
  ["classify", "Classification."],
  ["tokenize", "Tokens of texts, and texts of tokens."],
  ["metrics", "Reads /metrics and /load, for a monitoring system."],
  ["admin:read", "Reads every page of operators, changes nothing."],
  ["admin", "Changes everything below /admin: tenants, keys, models."],
];

export interface ScopeChoiceProps {
  // Null: all operations.
  scopes: string[] | null;
  onChange: (scopes: string[] | null) => void;
  isChecked: boolean;
  error?: string | null;
}

export function ScopeChoice({ scopes, onChange, isChecked, error }: ScopeChoiceProps) {
  const id = useId();
  const problem = error ?? (isChecked && scopes?.length === 0 ? "Choose at least one scope." : null);
  return (
    <fieldset class={`choice${problem ? " wrong" : ""}`}>
      <legend>Scopes</legend>
      <div class="row">
        {([true, false] as const).map((isAll) => (
          <label class="check" key={String(isAll)}>
            <input type="radio" name={id} checked={(scopes === null) === isAll} onChange={() => onChange(isAll ? null : [])} />
            {isAll ? "All operations" : "Only these"}
          </label>
        ))}
      </div>
      {scopes === null ? (
        <p class="note">It may embed, rerank, classify and tokenize; it is not for metrics and operators.</p>
      ) : (
        SCOPES.map(([name, meaning]) => (
          <Check
            key={name}
            label={<code>{name}</code>}
            note={meaning}
            checked={scopes.includes(name)}
            onChange={(isOn) => onChange(isOn ? [...scopes, name] : scopes.filter((other) => other !== name))}
          />
        ))
      )}
      {problem && (
        <p class="field-error" role="alert">
          {problem}
        </p>
      )}
    </fieldset>
  );
}
