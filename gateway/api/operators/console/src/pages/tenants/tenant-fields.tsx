// The fields of a tenant. What is seldom set is in the part for advanced settings.
import { LimitRows } from "../../ui/limit-rows.tsx";
import { USER_UNITS } from "../../lib/limits.ts";
import { Check, Select, TextArea, TextField } from "../../ui/field.tsx";
import { ModelChoice } from "../../ui/model-choice.tsx";
import { ModelLimitGroups } from "./model-limits.tsx";
import type { Errors, TenantForm } from "./tenant-form.ts";

export interface TenantFieldsProps {
  form: TenantForm;
  set: (part: Partial<TenantForm>) => void;
  errors: Errors;
  isNew: boolean;
  isChecked: boolean;
}

const hasAdvanced = ({ userLimits, queueTokens, join, certificates, modelLimits }: TenantForm) =>
  userLimits.length > 0 || modelLimits.length > 0 || queueTokens !== "" || !join || certificates !== "";

export function TenantFields({ form, set, errors, isNew, isChecked }: TenantFieldsProps) {
  const isOpen = hasAdvanced(form) || Boolean(errors.queue_tokens || errors.certificates || errors.model_limits);
  return (
    <>
      {isNew && (
        <TextField
          label="Name"
          value={form.name}
          onInput={(name) => set({ name })}
          error={errors.name}
          hint="As it is in usage, logs and metrics. It cannot be changed later."
          autoFocus
        />
      )}
      <LimitRows legend="Limits" rows={form.limits} onChange={(limits) => set({ limits })} errors={errors} isChecked={isChecked} />
      <ModelChoice
        legend="Allowed models"
        models={form.models}
        onChange={(models) => set({ models })}
        typed={form.typedModel}
        onType={(typedModel) => set({ typedModel })}
        error={errors.models}
      />
      <div class="fields">
        <TextField
          label="Weight"
          value={form.weight}
          onInput={(weight) => set({ weight })}
          error={errors.weight}
          hint="Share of tokens while several tenants wait for a model."
        />
        <Select
          label="Class"
          value={form.priority}
          onChange={(priority) => set({ priority })}
          options={["interactive", "bulk"]}
          hint="Calls of class bulk wait for interactive ones."
          error={errors.priority}
        />
      </div>
      <details class="advanced" open={isOpen}>
        <summary>Advanced</summary>
        <div class="stack">
          <ModelLimitGroups form={form} set={set} errors={errors} isChecked={isChecked} />
          <LimitRows
            legend="Limits of each end user"
            note="No limit: the people for whom the tenant calls share its limits."
            rows={form.userLimits}
            onChange={(userLimits) => set({ userLimits })}
            errors={errors}
            isChecked={isChecked}
            units={USER_UNITS}
          />
          <TextField
            label="Tokens that may wait"
            value={form.queueTokens}
            onInput={(queueTokens) => set({ queueTokens })}
            error={errors.queue_tokens}
            hint="Most tokens of the tenant in the queue of one model. Empty: its share of the queue."
          />
          <Check
            label="Its texts may share a request to a server with those of other tenants"
            checked={form.join}
            onChange={(join) => set({ join })}
          />
          <TextArea
            label="Client certificates"
            rows={3}
            value={form.certificates}
            onInput={(certificates) => set({ certificates })}
            error={errors.certificates}
            hint="One a line, such as dns:indexer.example.org, uri:spiffe://example.org/indexer or sha256:<fingerprint>."
          />
        </div>
      </details>
    </>
  );
}
