// Limits of a tenant's use of single models, in addition to those of the tenant.
import { useId } from "preact/hooks";
import { Plus, Trash2 } from "lucide";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { LimitRows } from "../../ui/limit-rows.tsx";
import type { ModelLimits } from "./tenant-form.ts";
import type { TenantFieldsProps } from "./tenant-fields.tsx";

export function ModelLimitGroups({ form, set, errors, isChecked }: Omit<TenantFieldsProps, "isNew">) {
  const id = useId();
  const { snapshot } = useStatus();
  const groups = form.modelLimits;
  const change = (at: number, part: Partial<ModelLimits>) =>
    set({ modelLimits: groups.map((group, index) => (index === at ? { ...group, ...part } : group)) });
  return (
    <fieldset class="limit-rows">
      <legend>Limits of single models</legend>
      {!groups.length && <p class="note">No limit of its own for any model.</p>}
      {groups.map(({ model, rows }, at) => (
        <div class="model-limits" key={at}>
          <div class="row">
            <input
              aria-label={`Model of group ${at + 1}`}
              placeholder="Name of a model"
              list={`${id}-models`}
              value={model}
              spellcheck={false}
              dir="auto"
              onInput={(event) => change(at, { model: event.currentTarget.value })}
            />
            <Button
              kind="ghost"
              icon={Trash2}
              label={`Remove the limits of ${model || `group ${at + 1}`}`}
              onClick={() => set({ modelLimits: groups.filter((_, index) => index !== at) })}
            />
          </div>
          <LimitRows
            legend={`Limits of ${model || "this model"}`}
            note="Add a limit; without one the group is not saved."
            rows={rows}
            onChange={(changed) => change(at, { rows: changed })}
            errors={errors}
            isChecked={isChecked}
          />
        </div>
      ))}
      <datalist id={`${id}-models`}>
        {(snapshot?.models ?? []).map(({ name }) => (
          <option key={name} value={name} />
        ))}
      </datalist>
      {errors.model_limits && (
        <p class="field-error" role="alert">
          {errors.model_limits}
        </p>
      )}
      <Button
        isSmall
        icon={Plus}
        onClick={() => set({ modelLimits: [...groups, { model: "", rows: [{ amount: "", unit: "tokens", window: "day" }] }] })}
      >
        Add a model
      </Button>
    </fieldset>
  );
}
