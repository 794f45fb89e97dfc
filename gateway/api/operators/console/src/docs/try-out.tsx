// A form that sends the request of an operation to this gateway, and shows the reply. The key is that of this tab, which
// the console uses too.
import { useEffect, useRef, useState } from "preact/hooks";
import { Send } from "lucide";
import { currentKey, setKey } from "../lib/session.ts";
import { Button } from "../ui/button.tsx";
import { Select, TextArea, TextField } from "../ui/field.tsx";
import { Problem } from "../ui/states.tsx";
import type { Operation, Parameter } from "./document.ts";
import { FormFields } from "./form-fields.tsx";
import { modelsFor, type ServedModel, servedFor, withModel } from "./models.ts";
import { type ShownReply, sendRequest } from "./reply.ts";
import { ReplyView } from "./reply-view.tsx";
import { type Draft, formSchemaOf, parametersOf, requestOf } from "./request.ts";
import { type Schemas, valuesOf } from "./schema.ts";

export interface TryOutProps {
  operation: Operation;
  draft: Draft;
  onChange: (change: (draft: Draft) => Draft) => void;
  base: string;
  schemas: Schemas;
}

export function TryOut({ operation, draft, onChange, base, schemas }: TryOutProps) {
  const [key, setTyped] = useState(currentKey);
  const [models, setModels] = useState<ServedModel[]>([]);
  const [busy, setBusy] = useState(false);
  const [reply, setReply] = useState<ShownReply | null>(null);
  const [problem, setProblem] = useState("");
  const { path } = draft;
  const named = useRef("");
  // Resolves to a body with the names of models that the key may use. The form shows them too.
  const nameModels = async (typed: string, body: string): Promise<string> => {
    named.current = typed;
    const served = /^[!-~]*$/.test(typed) ? await modelsFor(base, typed) : [];
    // Unless another key was typed meanwhile.
    if (named.current === typed) {
      setModels(served);
      onChange((before) => ({ ...before, body: withModel(before.body, served, path) }));
    }
    return withModel(body, served, path);
  };
  useEffect(() => {
    if (currentKey()) void nameModels(currentKey(), draft.body);
  }, [operation]);
  const keep = () => {
    const typed = key.trim();
    if (typed !== currentKey()) setKey(typed);
    if (typed) void nameModels(typed, draft.body);
  };
  const submit = async (event: Event) => {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    setProblem("");
    const typed = key.trim();
    try {
      if (typed !== currentKey()) setKey(typed);
      // What is sent is what the form shows: it waits for the names, and keeps what is typed from now on for later.
      const body = operation.needsKey && draft.body ? await nameModels(typed, draft.body) : draft.body;
      setReply(await sendRequest(requestOf(operation, { ...draft, body }, base, false), typed));
    } catch (error) {
      setReply(null);
      setProblem((error as Error).message);
    } finally {
      setBusy(false);
    }
  };
  const setValue = (name: string, value: string) => onChange((before) => ({ ...before, values: { ...before.values, [name]: value } }));
  const form = formSchemaOf(operation, schemas);
  const changes = operation.method !== "GET" && operation.path.startsWith("/admin");
  return (
    <section class="card try-out" aria-label="Try it">
      <h2>Try it</h2>
      <form class="stack" onSubmit={submit} autocomplete="off">
        {operation.needsKey && (
          <div onChange={keep}>
            <TextField label="API key" type="password" value={key} onInput={setTyped} hint="Kept in this tab only, for the console too." />
          </div>
        )}
        {parametersOf(operation, path).map((parameter) => (
          <ParameterField
            key={parameter.name}
            parameter={parameter}
            value={draft.values[parameter.name] ?? ""}
            models={parameter.in === "path" ? servedFor(models, path) : []}
            onChange={setValue}
          />
        ))}
        {draft.body && <TextArea label="Body" rows={Math.min(14, draft.body.split("\n").length + 1)} value={draft.body} onInput={(body) => onChange((before) => ({ ...before, body }))} />}
        {form && <FormFields schema={form} form={draft.form} onChange={(fields) => onChange((before) => ({ ...before, form: fields }))} />}
        <div class="row">
          <Button kind="primary" type="submit" icon={Send} busy={busy}>
            Send
          </Button>
          {changes && <span class="note">This changes the gateway.</span>}
        </div>
      </form>
      <div aria-live="polite">
        <Problem id="try-problem">{problem}</Problem>
        {busy && <p class="note">Waiting for the reply …</p>}
        {reply && !busy && <ReplyView reply={reply} />}
      </div>
    </section>
  );
}

interface ParameterFieldProps {
  parameter: Parameter;
  value: string;
  models: string[];
  onChange: (name: string, value: string) => void;
}

function ParameterField({ parameter, value, models, onChange }: ParameterFieldProps) {
  const { name, schema, required } = parameter;
  const values = valuesOf(schema, {}).map(String);
  const label = required ? `${name} (required)` : name;
  if (values.length || schema.type === "boolean") {
    const options = ["", ...(values.length ? values : ["true", "false"])];
    return <Select label={label} value={value} onChange={(text) => onChange(name, text)} options={options} />;
  }
  return <TextField label={label} value={value} onInput={(text) => onChange(name, text)} options={models.length ? models : undefined} />;
}
