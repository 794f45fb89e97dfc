// One text by several models, side by side.
import { useState } from "preact/hooks";
import { RequestError } from "../../lib/api.ts";
import { count, milliseconds, NONE } from "../../lib/format.ts";
import { useAction } from "../../lib/load.ts";
import { type Embedded, embed } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { Check, TextArea, TextField } from "../../ui/field.tsx";
import { Note } from "../../ui/states.tsx";
import { TryForm } from "./form.tsx";
import { HeatMap } from "./heat-map.tsx";
import { able } from "./models.ts";

const OFFERED_MAX = 24;

interface Compared {
  name: string;
  reply?: Embedded;
  problem?: string;
}

export function CompareTab({ models }: { models: ListedModel[] }) {
  const names = able(models, "embed").map(({ id }) => id);
  const [left, setLeft] = useState<string[] | null>(null);
  const chosen = left ?? names.slice(0, 4);
  const [sought, setSought] = useState("");
  const offered = names.filter((name) => name.toLowerCase().includes(sought.trim().toLowerCase()));
  // Chosen models stay in sight, whatever the filter.
  const shown = [...new Set([...chosen, ...offered])].slice(0, Math.max(OFFERED_MAX, chosen.length));
  const [text, setText] = useState("The quick brown fox jumps over the lazy dog.");
  const action = useAction(async () => {
    if (chosen.length < 2 || !text.trim()) throw new RequestError(0, "Write a text, and choose two models or more.");
    return Promise.all(
      chosen.map((name): Promise<Compared> =>
        embed(name, [text.trim()]).then(
          (reply) => ({ name, reply }),
          (error) => ({ name, problem: String(error.message) }),
        ),
      ),
    );
  });
  const replies = action.outcome ?? [];
  const embedded = replies.flatMap(({ name, reply }) => (reply ? [{ name, row: reply.rows[0] ?? [] }] : []));
  const widths = new Set(embedded.map(({ row }) => row.length));
  const toggle = (name: string) =>
    setLeft(chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name]);
  return (
    <TryForm
      id="compare"
      title="One text, several models"
      verb="Compare"
      action={action}
      said={action.outcome && `Done: ${embedded.length} of ${replies.length} models. Tables follow.`}
      fields={
        <>
          <fieldset>
            <legend>Models</legend>
            {names.length > OFFERED_MAX && <TextField label="Filter the models" value={sought} onInput={setSought} />}
            {shown.map((name) => (
              <Check key={name} label={name} checked={chosen.includes(name)} onChange={() => toggle(name)} />
            ))}
            {names.length > shown.length && <Note>{`${shown.length} of ${count(names.length)} models are shown.`}</Note>}
          </fieldset>
          <TextArea label="Text" rows={3} value={text} onInput={setText} />
        </>
      }
    >
      {replies.length > 0 && (
        <>
          <Replies replies={replies} />
          {embedded.length > 1 && (
            <HeatMap
              caption="Cosine of the same text"
              names={embedded.map(({ name }) => name)}
              rows={embedded.map(({ row }) => row)}
            />
          )}
          {widths.size > 1 && <Note>Vectors of unequal width cannot be compared.</Note>}
          <Note>Only models of the same vector space are expected to agree.</Note>
        </>
      )}
    </TryForm>
  );
}

const Replies = ({ replies }: { replies: Compared[] }) => (
  <div class="scroll" role="region" aria-label="Models" tabIndex={0}>
    <table class="plain">
      <thead>
        <tr>
          {["model", "width", "tokens", "time", "vector space"].map((title) => (
            <th scope="col" key={title}>
              {title}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {replies.map(({ name, reply, problem }) => (
          <tr key={name}>
            <td>{name}</td>
            {reply ? (
              <>
                <td>{count(reply.width)}</td>
                <td>{count(reply.tokens)}</td>
                <td>{milliseconds(reply.elapsedMs / 1000)}</td>
                <td class="mono">{reply.space ?? NONE}</td>
              </>
            ) : (
              <td class="field-error" colSpan={4}>
                {problem}
              </td>
            )}
          </tr>
        ))}
      </tbody>
    </table>
  </div>
);
