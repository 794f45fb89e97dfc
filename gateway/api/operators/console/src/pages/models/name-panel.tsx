// Adds a name for callers, or changes an added one.
import { useState } from "preact/hooks";
import { type Addition, furtherSettings, parsedSettings, putAddition } from "../../lib/additions.ts";
import { RequestError } from "../../lib/api.ts";
import { fieldProblems, unshown } from "../../lib/field-problems.ts";
import { useAction } from "../../lib/load.ts";
import { useStatus } from "../../lib/status.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Check, Select, TextArea, TextField } from "../../ui/field.tsx";
import { Problem } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";

export interface NamePanelProps {
  // Absent for a new one.
  addition?: Addition;
  // Chosen at first for a new one.
  upstream?: string;
  onClose: () => void;
  onSaved: () => void;
}

const OWN = ["upstream", "price_per_million_tokens", "cache"];
const PRICE = "price_per_million_tokens";

const formOf = (addition: Addition | undefined, upstream: string) => ({
  name: addition?.name ?? "",
  upstream: addition ? String(addition.settings.upstream ?? "") : upstream,
  price: String(addition?.settings[PRICE] ?? ""),
  cache: addition?.settings.cache === true,
  more: addition ? furtherSettings(addition.settings, OWN) : "",
});

export function NamePanel({ addition, upstream, onClose, onSaved }: NamePanelProps) {
  const { snapshot } = useStatus();
  const upstreams = (snapshot?.lanes ?? []).map((lane) => lane.upstream);
  const [start] = useState(() => formOf(addition, upstream ?? upstreams[0] ?? ""));
  const [form, setForm] = useState(start);
  const set = (part: Partial<typeof form>) => setForm((before) => ({ ...before, ...part }));
  const name = form.name.trim();
  const save = useAction(async () => {
    if (!name) throw new RequestError(0, "Write a name.", "name");
    return putAddition("models", name, {
      ...parsedSettings(form.more),
      ...(form.upstream ? { upstream: form.upstream } : {}),
      ...(form.price.trim() ? { [PRICE]: Number(form.price) } : {}),
      ...(form.cache ? { cache: true } : {}),
    });
  });
  const problems = fieldProblems(save.problem, `models.${name}`);
  const wordsOf = (key: string) => problems.fields.get(key) ?? null;
  const more = wordsOf("more") ?? unshown(problems, ["", "name", ...OWN, "more"]);
  return (
    <Dialog
      isPanel
      id="name-panel"
      title={addition ? "Change the model" : "New name"}
      note={addition ? addition.name : "A name for callers, served by an upstream. It works at once, on every gateway that shares the store."}
      isDirty={JSON.stringify(form) !== JSON.stringify(start) && !save.outcome}
      onClose={onClose}
      onSubmit={async () => {
        if (!(await save.run())) return;
        notify(`${name} is saved.`);
        onSaved();
      }}
      actions={
        <>
          <Button onClick={onClose}>Cancel</Button>
          <Button kind="primary" type="submit" busy={save.busy}>
            Save the name
          </Button>
        </>
      }
    >
      <Problem>{problems.other ?? (addition ? wordsOf("") : null)}</Problem>
      {!addition && (
        <TextField
          label="Name for callers"
          value={form.name}
          onInput={(text) => set({ name: text })}
          hint="such as bge-m3 or org/model"
          autoFocus
          isRequired
          error={wordsOf("name") ?? wordsOf("")}
        />
      )}
      <Select
        label="Upstream"
        value={form.upstream}
        onChange={(text) => set({ upstream: text })}
        options={[...(upstreams.includes(form.upstream) ? [] : [[form.upstream, form.upstream || "several, below"] as [string, string]]), ...upstreams]}
        error={wordsOf("upstream")}
      />
      <TextField
        label={`Price of a million tokens${snapshot?.currency ? `, in ${snapshot.currency}` : ""}`}
        type="number"
        value={form.price}
        onInput={(text) => set({ price: text })}
        hint="empty: nothing is charged"
        error={wordsOf(PRICE)}
      />
      <div>
        <Check label="Keep its vectors in the cache" checked={form.cache} onChange={(on) => set({ cache: on })} />
        {wordsOf("cache") && <p class="field-error">{wordsOf("cache")}</p>}
      </div>
      <TextArea
        label="Further settings, as JSON"
        value={form.more}
        onInput={(text) => set({ more: text })}
        hint={'as in router.yaml, such as {"canary": {"name": "next", "share": 0.05}}'}
        error={more}
      />
    </Dialog>
  );
}
