// The panel in which a tenant is written: its fields, checks and buttons.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { RequestError } from "../../lib/api.ts";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Problem } from "../../ui/states.tsx";
import { errorsOf, problemsOf, type TenantForm } from "./tenant-form.ts";
import { TenantFields } from "./tenant-fields.tsx";

export interface TenantPanelProps {
  title: string;
  note: string;
  verb: string;
  form: TenantForm;
  // As it was opened.
  saved: TenantForm;
  set: (part: Partial<TenantForm>) => void;
  isNew?: boolean;
  busy: boolean;
  problem: RequestError | null;
  onSave: () => void;
  onClose: () => void;
  // In front of the fields.
  children?: ComponentChildren;
}

export function TenantPanel(props: TenantPanelProps) {
  const { title, note, verb, form, saved, set, isNew = false, busy, problem, onSave, onClose, children } = props;
  const [isChecked, setChecked] = useState(false);
  const { snapshot } = useStatus();
  const own = problemsOf(form, saved, (snapshot?.models ?? []).map((model) => model.name));
  const errors = isChecked ? { ...errorsOf(problem, form), ...own } : errorsOf(problem, form);
  const submit = () => {
    setChecked(true);
    if (!Object.keys(own).length) onSave();
  };
  const hasOwn = isChecked && Object.keys(own).length > 0;
  return (
    <Dialog
      title={title}
      note={note}
      isPanel
      id="tenant-panel"
      isDirty={JSON.stringify(form) !== JSON.stringify(saved)}
      onClose={onClose}
      onSubmit={submit}
      actions={
        <>
          {hasOwn && <span class="field-error">Correct the marked fields.</span>}
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" busy={busy}>
            {verb}
          </Button>
        </>
      }
    >
      {children}
      <Problem>{errors[""] ?? (isNew ? undefined : errors.name)}</Problem>
      <TenantFields form={form} set={set} errors={errors} isNew={isNew} isChecked={isChecked} />
    </Dialog>
  );
}
