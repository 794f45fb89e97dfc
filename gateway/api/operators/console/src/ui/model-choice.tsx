// The models that something may use: all, or those that are named. Names of models that are not served yet are allowed.
import { useId } from "preact/hooks";
import { Plus, X } from "lucide";
import { useStatus } from "../lib/status.ts";
import { Button } from "./button.tsx";
import { Clip } from "./clip.tsx";

export interface ModelChoiceProps {
  legend: string;
  // Null: all.
  models: string[] | null;
  onChange: (models: string[] | null) => void;
  error?: string | null;
  // The name that is written and not yet added.
  typed: string;
  onType: (typed: string) => void;
}

// The models with the name that is written and not yet added.
export const withTyped = (models: string[] | null, typed: string) =>
  models && typed.trim() && !models.includes(typed.trim()) ? [...models, typed.trim()] : models;

// Why a choice is not sent, or null: it takes the name that is written only if it is served.
export function modelsProblem(models: string[] | null, typed: string, served: string[]): string | null {
  const all = withTyped(models, typed);
  if (!all) return null;
  const name = typed.trim();
  if (name && !models?.includes(name) && !served.includes(name)) return `${name} is not served: add it all the same, or clear the field.`;
  return all.length ? null : "Choose a model, or all models.";
}

export function ModelChoice({ legend, models, onChange, error, typed, onType }: ModelChoiceProps) {
  const id = useId();
  const { snapshot } = useStatus();
  const served = (snapshot?.models ?? []).map(({ name }) => name);
  const offered = served.filter((name) => !models?.includes(name));
  const add = (name: string) => {
    onType("");
    if (name && !models?.includes(name)) onChange([...(models ?? []), name]);
  };
  return (
    <fieldset class={`choice${error ? " wrong" : ""}`}>
      <legend>{legend}</legend>
      <div class="row">
        {([true, false] as const).map((isAll) => (
          <label class="check" key={String(isAll)}>
            <input type="radio" name={id} checked={(models === null) === isAll} onChange={() => onChange(isAll ? null : [])} />
            {isAll ? "All models" : "Only these"}
          </label>
        ))}
      </div>
      {models && (
        <>
          {models.length > 0 ? (
            <ul class="chips">
              {models.map((name) => (
                <li key={name}>
                  <Clip text={name} />
                  {!served.includes(name) && <span class="note">not served</span>}
                  <Button
                    kind="ghost"
                    isSmall
                    icon={X}
                    label={`Remove ${name}`}
                    onClick={() => onChange(models.filter((other) => other !== name))}
                  />
                </li>
              ))}
            </ul>
          ) : (
            <p class="note">None: no call is allowed.</p>
          )}
          <div class="row">
            <input
              aria-label={`Model to add: ${legend}`}
              placeholder="Name of a model"
              list={`${id}-list`}
              value={typed}
              autocomplete="off"
              spellcheck={false}
              onInput={(event) => {
                const name = event.currentTarget.value;
                onType(name);
                // One that was chosen from the list comes whole.
                const { inputType } = event as InputEvent;
                if ((!inputType || inputType === "insertReplacementText") && offered.includes(name)) add(name);
              }}
              onKeyDown={(event) => {
                if (event.key !== "Enter") return;
                event.preventDefault();
                add(typed.trim());
              }}
            />
            <datalist id={`${id}-list`}>
              {offered.map((name) => (
                <option key={name} value={name} />
              ))}
            </datalist>
            <Button isSmall icon={Plus} disabled={!typed.trim()} onClick={() => add(typed.trim())}>
              Add the model
            </Button>
          </div>
        </>
      )}
      {error && (
        <p class="field-error" role="alert">
          {error}
        </p>
      )}
    </fieldset>
  );
}
