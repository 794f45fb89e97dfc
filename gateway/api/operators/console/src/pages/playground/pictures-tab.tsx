// Pictures against captions, by a model that embeds both.
import { useState } from "preact/hooks";
import { RequestError } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { checkTexts, dataUri, embed, linesOf } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { TextArea } from "../../ui/field.tsx";
import { Note } from "../../ui/states.tsx";
import { Facts } from "./facts.tsx";
import { TryForm } from "./form.tsx";
import { HeatMap } from "./heat-map.tsx";
import { ModelSelect } from "./model-select.tsx";
import { useModel } from "./models.ts";
import { PictureField, Thumbnail } from "./picture-field.tsx";
import { usePictures } from "./pictures.ts";
import { shortened } from "./scores.tsx";

const TEXTS_MAX = 40;

export function PicturesTab({ models }: { models: ListedModel[] }) {
  const model = useModel(models, "embed");
  const state = usePictures();
  const [text, setText] = useState("a photo of a cat\na photo of a dog\na diagram\na page of text");
  const action = useAction(async () => {
    const texts = linesOf(text);
    const shown = state.pictures;
    if (!texts.length || !shown.length) throw new RequestError(0, "Choose at least one image, and write at least one text.");
    checkTexts(texts, TEXTS_MAX);
    const uris = await Promise.all(shown.map(({ file }) => dataUri(file)));
    const reply = await embed(model.value, [...texts, ...uris.map((image) => ({ image }))]);
    return { model: model.value, texts, shown, reply };
  });
  const { outcome } = action;
  return (
    <TryForm
      id="images"
      title="Compare images with texts"
      verb="Compare images"
      action={action}
      said={outcome && `Done: ${outcome.shown.length} images. The cosines follow as a table.`}
      fields={
        <>
          <ModelSelect model={model} />
          <PictureField state={state} />
          <TextArea label="Captions, one a line" rows={5} value={text} onInput={setText} />
        </>
      }
    >
      {outcome && (
        <>
          <Facts model={outcome.model} facts={outcome.reply} />
          <HeatMap
            caption="Cosine of each text with each image"
            names={outcome.texts.map(shortened)}
            rows={outcome.reply.rows.slice(0, outcome.texts.length)}
            columns={outcome.reply.rows.slice(outcome.texts.length)}
            heads={outcome.shown.map((picture) => (
              <Thumbnail key={picture.url} picture={picture} />
            ))}
          />
          <Note>Cosines of texts and images are small for most models; compare them within a row.</Note>
        </>
      )}
    </TryForm>
  );
}
