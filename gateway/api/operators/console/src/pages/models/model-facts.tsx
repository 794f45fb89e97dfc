// What a model offers: operations, vectors, price, memory, cache, and notes about its replicas.
import { bytes, count, money, NONE } from "../../lib/format.ts";
import { useAccess } from "../../shell/access.ts";
import { Card } from "../../ui/card.tsx";
import { KeyValues } from "../../ui/key-values.tsx";
import { Fingerprint } from "./fingerprint.tsx";
import { type ModelRow, notesOf } from "./rows.ts";
import { Tags } from "./tags.tsx";

export function ModelFacts({ row, currency }: { row: ModelRow; currency: string | null }) {
  const { model, addition, name } = row;
  const { models } = useAccess();
  const listed = models?.find(({ id }) => id === name);
  const defaults = (listed?.default_for as string[] | undefined) ?? [];
  const notes = model ? notesOf(model) : [];
  const price = model?.price_per_million_tokens;
  return (
    <Card title="Facts" id="model-facts">
      <div class="stack">
        {model && (
          <KeyValues
            rows={[
              ["Operations", <Tags names={model.operations} />],
              ["Width of its vectors", count(model.dimensions)],
              ["Vector space", <Fingerprint text={model.fingerprint} isWhole />],
              ["Longest input", listed?.max_model_len ? `${count(listed.max_model_len as number)} tokens` : NONE],
              ["Price of a million tokens", price ? money(price, currency) : "nothing"],
              ["Cache", model.cache ?? "off"],
              model.memory_bytes !== null && ["Memory in this gateway", bytes(model.memory_bytes)],
              defaults.length > 0 && ["Default for", defaults.join(", ")],
            ]}
          />
        )}
        {notes.length > 0 && (
          <div>
            <h3>Notes</h3>
            <ul class="notes">
              {notes.map((note) => (
                <li key={note}>{note}</li>
              ))}
            </ul>
          </div>
        )}
        {addition && (
          <div>
            <h3>Settings that were added</h3>
            <pre tabIndex={0} aria-label="Settings">
              {JSON.stringify(addition.settings, null, 2)}
            </pre>
          </div>
        )}
      </div>
    </Card>
  );
}
