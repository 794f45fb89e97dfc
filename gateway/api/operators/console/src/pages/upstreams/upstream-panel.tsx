// Adds an upstream, or changes an added one.
import { useState } from "preact/hooks";
import { type Addition, type ChangeReport, putAddition } from "../../lib/additions.ts";
import { RequestError } from "../../lib/api.ts";
import { fieldProblems, unshown } from "../../lib/field-problems.ts";
import { useAction } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Select, TextArea, TextField } from "../../ui/field.tsx";
import { Problem } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";
import { BACKENDS, EMPTY, fieldsOf, formOf, settingsOf, type UpstreamForm } from "./form.ts";
import { UpstreamField } from "./upstream-field.tsx";

export interface UpstreamPanelProps {
  // Absent for a new one.
  addition?: Addition;
  onClose: () => void;
  onSaved: (report: ChangeReport) => void;
}

export function UpstreamPanel({ addition, onClose, onSaved }: UpstreamPanelProps) {
  const [start] = useState<UpstreamForm>(() => (addition ? formOf(addition) : EMPTY));
  const [form, setForm] = useState(start);
  const set = (part: Partial<UpstreamForm>) => setForm((before) => ({ ...before, ...part }));
  const name = form.name.trim();
  const serve = form.serve.trim();
  const save = useAction(async () => {
    if (!name) throw new RequestError(0, "Write a name.", "name");
    const report = await putAddition("upstreams", name, settingsOf(form));
    if (!serve) return report;
    const served = await putAddition("models", serve, { upstream: name });
    return { changes: [...report.changes, ...served.changes], needs_restart: [...report.needs_restart, ...served.needs_restart] };
  });
  const fields = fieldsOf(form.backend);
  const shown = fields.map(({ key }) => key);
  const problems = fieldProblems(save.problem, `upstreams.${name}`, shown);
  const served = fieldProblems(save.problem, `models.${serve}`);
  const isServed = Boolean(serve) && served.fields.size > 0;
  const more = problems.fields.get("more") ?? unshown(problems, ["", "name", "backend", "more", ...shown]);
  const field = (isRare: boolean) =>
    fields
      .filter((each) => Boolean(each.isRare) === isRare)
      .map((each) => (
        <UpstreamField
          key={each.key}
          field={each}
          backend={form.backend}
          value={form.values[each.key] ?? ""}
          error={problems.fields.get(each.key) ?? null}
          onInput={(text) => set({ values: { ...form.values, [each.key]: text } })}
        />
      ));
  const hasRare = Boolean(more) || fields.some(({ key, isRare }) => isRare && (form.values[key] || problems.fields.has(key)));
  return (
    <Dialog
      isPanel
      id="upstream-panel"
      title={addition ? "Change the upstream" : "Add an upstream"}
      note={addition ? addition.name : "One or more equal servers of one model. It is used at once, by every gateway that shares the store."}
      isDirty={JSON.stringify(form) !== JSON.stringify(start) && !save.outcome}
      onClose={onClose}
      onSubmit={async () => {
        const report = await save.run();
        if (!report) return;
        notify(`${name} is saved.`);
        onSaved(report);
      }}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" busy={save.busy}>
            Save the upstream
          </Button>
        </>
      }
    >
      {!isServed && <Problem>{problems.other}</Problem>}
      {!addition && (
        <TextField
          label="Name of the upstream"
          value={form.name}
          onInput={(text) => set({ name: text })}
          autoFocus
          isRequired
          error={problems.fields.get("name") ?? problems.fields.get("") ?? null}
        />
      )}
      {addition && <Problem>{problems.fields.get("")}</Problem>}
      <Select
        label="Kind of server"
        value={form.backend}
        onChange={(backend) => set({ backend })}
        options={BACKENDS}
        error={problems.fields.get("backend") ?? null}
      />
      {field(false)}
      {!addition && (
        <TextField
          label="Serve it as the model"
          value={form.serve}
          onInput={(text) => set({ serve: text })}
          hint="the name that callers use; it can be given later, on the page Models"
          error={isServed ? [...served.fields.values()].join("; ") : null}
        />
      )}
      <details open={hasRare || undefined}>
        <summary>More settings</summary>
        <div class="stack more">
          {field(true)}
          <TextArea
            label="Further settings, as JSON"
            value={form.more}
            onInput={(text) => set({ more: text })}
            rows={3}
            hint={'as in router.yaml, such as {"limits": {"requests_per_minute": 600}}'}
            error={more}
          />
        </div>
      </details>
    </Dialog>
  );
}
