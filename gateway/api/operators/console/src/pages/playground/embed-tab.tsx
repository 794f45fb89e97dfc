// Texts, compared with one another.
import { useState } from "preact/hooks";
import { useAction } from "../../lib/load.ts";
import { embedCode } from "../../lib/samples/calls.ts";
import { checkTexts, embed, linesOf } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { TextArea } from "../../ui/field.tsx";
import { Facts } from "./facts.tsx";
import { TryForm } from "./form.tsx";
import { HeatMap } from "./heat-map.tsx";
import { ModelSelect } from "./model-select.tsx";
import { useModel } from "./models.ts";
import { shortened } from "./scores.tsx";

const TEXTS_MAX = 40;
const TEXTS = `How do I reset my password?
I forgot my login and cannot get in.
The parcel arrived two days late.
Where is my order?
Bread needs flour, water, salt and yeast.`;

export function EmbedTab({ models }: { models: ListedModel[] }) {
  const model = useModel(models, "embed");
  const [text, setText] = useState(TEXTS);
  const action = useAction(async () => {
    const texts = linesOf(text);
    checkTexts(texts, TEXTS_MAX);
    return { model: model.value, texts, reply: await embed(model.value, texts) };
  });
  const { outcome } = action;
  return (
    <TryForm
      id="embed"
      title="Embed texts and compare them"
      verb="Embed"
      action={action}
      said={outcome && `Done: ${outcome.texts.length} texts. The cosines follow as a table.`}
      samples={embedCode(model.value, linesOf(text))}
      fields={
        <>
          <ModelSelect model={model} />
          <TextArea label="Texts, one a line" rows={8} value={text} onInput={setText} />
        </>
      }
    >
      {outcome && (
        <>
          <Facts model={outcome.model} facts={outcome.reply} />
          <HeatMap caption="Cosine similarity" names={outcome.texts.map(shortened)} rows={outcome.reply.rows} />
        </>
      )}
    </TryForm>
  );
}
