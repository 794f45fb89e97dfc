// Finds the answer on a page, by a model that embeds its patches.
import { useState } from "preact/hooks";
import { RequestError, send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { dataUri, factsOf, product } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { TextField } from "../../ui/field.tsx";
import { Facts } from "./facts.tsx";
import { FileField } from "./file-field.tsx";
import { TryForm } from "./form.tsx";
import { MarkedPage, type PatchGrid } from "./marked-page.tsx";
import { ModelSelect } from "./model-select.tsx";
import { useModel } from "./models.ts";
import { IMAGE_BYTES_MAX, IMAGE_TYPES } from "./pictures.ts";

interface MultiVectorReply {
  data: { embeddings: number[][]; patch_grid?: PatchGrid }[];
  usage?: { total_tokens: number };
}

// It is turned as its EXIF data says, and as the model reads it.
const loadPicture = (file: File) =>
  createImageBitmap(file).catch(() => {
    throw new RequestError(0, "this browser cannot show the page");
  });

async function mark(model: string, query: string, file: File) {
  const body = { model, input: [query, { image: await dataUri(file) }], encoding_format: "float" };
  const { content, headers, elapsedMs } = await send<MultiVectorReply>("/v1/multi-vector", { body });
  const [question, page] = content.data;
  const grid = page?.patch_grid;
  if (!question || !page || !grid) throw new RequestError(0, "the reply does not say where the patches of the page are");
  const patches = page.embeddings.slice(grid.first, grid.first + grid.rows * grid.columns);
  const cosines = question.embeddings.map((token) => patches.map((patch) => product(token, patch)));
  const score = cosines.reduce((sum, ofToken) => sum + Math.max(...ofToken), 0) / cosines.length;
  const picture = await loadPicture(file);
  return { model, marked: { picture, grid, cosines, score }, facts: factsOf(headers, elapsedMs, content.usage?.total_tokens ?? null) };
}

export function PagesTab({ models }: { models: ListedModel[] }) {
  const model = useModel(models, "encode");
  const [file, setFile] = useState<File | null>(null);
  const [query, setQuery] = useState("What was the revenue in the last quarter?");
  const action = useAction(async () => {
    if (!file || !query.trim()) throw new RequestError(0, "Choose a page, and write a question.");
    if (file.size > IMAGE_BYTES_MAX) throw new RequestError(0, `${file.name} is larger than ${IMAGE_BYTES_MAX / 1e6} MB`);
    return mark(model.value, query.trim(), file);
  });
  const { outcome } = action;
  return (
    <TryForm
      id="pages"
      title="Find the answer on a page"
      verb="Mark the page"
      action={action}
      said={outcome && `Done: score ${outcome.marked.score.toFixed(3)}. The marked page follows.`}
      fields={
        <>
          <ModelSelect model={model} />
          <FileField label="Page, as a picture" accept={IMAGE_TYPES} file={file} onChange={setFile} />
          <TextField label="Question" value={query} onInput={setQuery} />
        </>
      }
    >
      {outcome && (
        <>
          <Facts model={outcome.model} facts={outcome.facts} />
          <MarkedPage {...outcome.marked} />
        </>
      )}
    </TryForm>
  );
}
