// Makes a key of a tenant.
import { useState } from "preact/hooks";
import { get, type RequestError, send, withQuery } from "../../lib/api.ts";
import { type LimitRow, limitsOf, nameOf, rowProblem } from "../../lib/limits.ts";
import { useAction, useLoad } from "../../lib/load.ts";
import type { CreatedKey, TenantPage } from "../../lib/tenants.ts";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { TextField } from "../../ui/field.tsx";
import { LimitRows } from "../../ui/limit-rows.tsx";
import { ModelChoice, modelsProblem, withTyped } from "../../ui/model-choice.tsx";
import { Problem } from "../../ui/states.tsx";
import { ScopeChoice } from "./scope-choice.tsx";

const OFFERED = 20;

interface Form {
  tenant: string;
  id: string;
  expires: string;
  // Null: all operations.
  scopes: string[] | null;
  models: string[] | null;
  // A model that is written and not yet added.
  typedModel: string;
  limits: LimitRow[];
}

export interface NewKeyProps {
  // Whose key it is, where that is not chosen here.
  tenant?: string;
  onClose: () => void;
  onCreated: (created: CreatedKey) => void;
}

function useTenantNames(typed: string, isAsked: boolean) {
  const address = withQuery("/admin/tenants", { search: typed, sort: "name", limit: OFFERED });
  const { content } = useLoad(async () => (isAsked ? get<TenantPage>(address) : null), null, address);
  return (content?.data ?? []).map(({ name }) => name);
}

const bodyOf = ({ tenant, id, expires, scopes, models, typedModel, limits }: Form) => ({
  tenant: tenant.trim(),
  ...(id.trim() ? { id: id.trim() } : {}),
  ...(expires ? { expires } : {}),
  ...(scopes ? { scopes } : {}),
  ...(models ? { models: withTyped(models, typedModel) } : {}),
  limits: limitsOf(limits),
});

// Where the words of the gateway belong.
function placeOf({ param, message, status }: RequestError) {
  if (status === 409 || /^(there is a key|router\.yaml has)/.test(message)) return "id";
  return param ?? (/^(a|the) (key's )?id /.test(message) ? "id" : "");
}

export function NewKey({ tenant, onClose, onCreated }: NewKeyProps) {
  const empty: Form = { tenant: tenant ?? "", id: "", expires: "", scopes: null, models: null, typedModel: "", limits: [] };
  const [form, setForm] = useState(empty);
  const [isChecked, setChecked] = useState(false);
  const set = (part: Partial<Form>) => setForm((before) => ({ ...before, ...part }));
  const names = useTenantNames(form.tenant.trim(), tenant === undefined);
  const { busy, problem, run } = useAction(async () => (await send<CreatedKey>("/admin/keys", { body: bodyOf(form) })).content);
  const { snapshot } = useStatus();
  const wrongModels = modelsProblem(form.models, form.typedModel, (snapshot?.models ?? []).map((model) => model.name));
  const isMissing = isChecked && !form.tenant.trim();
  const isWrong = form.limits.some((row) => rowProblem(row, form.limits)) || form.scopes?.length === 0 || wrongModels;
  const submit = async () => {
    setChecked(true);
    if (!form.tenant.trim() || isWrong) return;
    const created = await run();
    if (created) onCreated(created);
  };
  const place = problem ? placeOf(problem) : null;
  const at = (field: string) => (problem && place === field ? problem.message : null);
  const fields = ["tenant", "id", "expires", "models", "scopes", ...form.limits.map(nameOf)];
  return (
    <Dialog
      title={tenant === undefined ? "New key" : `New key for ${tenant}`}
      note="It is shown once, right after this. Every gateway knows it within a second."
      isPanel
      id="key-panel"
      isDirty={JSON.stringify(form) !== JSON.stringify(empty)}
      onClose={onClose}
      onSubmit={submit}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" busy={busy}>
            Make the key
          </Button>
        </>
      }
    >
      <Problem>{problem && place !== null && !fields.includes(place) && problem.message}</Problem>
      {tenant === undefined && (
        <TextField
          label="Tenant"
          value={form.tenant}
          onInput={(value) => set({ tenant: value })}
          options={names}
          autoFocus
          error={isMissing ? "Choose a tenant." : at("tenant")}
          hint="Whose limits it shares, and who is billed."
        />
      )}
      <div class="fields">
        <TextField
          label="Id"
          value={form.id}
          onInput={(id) => set({ id })}
          autoFocus={tenant !== undefined}
          error={at("id")}
          hint="In logs and usage, such as search-prod. Empty: chosen for you."
        />
        <TextField
          label="Expires"
          type="date"
          value={form.expires}
          onInput={(expires) => set({ expires })}
          error={at("expires")}
          hint="At the beginning of the day in UTC. Empty: never."
        />
      </div>
      <ScopeChoice scopes={form.scopes} onChange={(scopes) => set({ scopes })} isChecked={isChecked} error={at("scopes")} />
      <ModelChoice
        legend="Models of the key"
        models={form.models}
        onChange={(models) => set({ models })}
        typed={form.typedModel}
        onType={(typedModel) => set({ typedModel })}
        error={at("models") ?? (isChecked ? wrongModels : null)}
      />
      <LimitRows
        legend="Limits of the key"
        note="None of its own: those of the tenant apply."
        rows={form.limits}
        onChange={(limits) => set({ limits })}
        errors={problem && place ? { [place]: problem.message } : {}}
        isChecked={isChecked}
      />
    </Dialog>
  );
}
