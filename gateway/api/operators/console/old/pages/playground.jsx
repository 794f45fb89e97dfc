// Forms that try the models. Each shows the code of its call.
import { useEffect, useRef, useState } from "preact/hooks";
import { RequestError, send } from "../api.js";
import { count, lines, NONE, shortened } from "../format.js";
import { useAction } from "../hooks.js";
import { Answer, Code, Note, Region, Select, Table, TextArea, TextField } from "../parts.jsx";
import { embedCode, rerankCode } from "../samples.js";
import { cosine, embed, HeatMap, meterRange, product } from "../vectors.jsx";

const TEXTS_MAX = 40;
const SEARCHED_MAX = 200;
const IMAGES_MAX = 12;
const IMAGE_BYTES_MAX = 4000000;
const PAGE_WIDTH = 800;
const OFFERED_MAX = 24;

const able = (models, operation) => models.filter((model) => model.operations.includes(operation));

// The chosen model of an operation: the caller's, else the gateway's default, else the first.
function useModel(models, operation) {
  const [chosen, setChosen] = useState("");
  const names = able(models, operation).map((model) => model.id);
  const preferred = models.find((model) => model.default_for.includes(operation))?.id;
  const fallback = names.includes(preferred) ? preferred : names[0];
  return { names, value: names.includes(chosen) ? chosen : (fallback ?? ""), onChange: setChosen };
}

const ModelSelect = ({ id, model }) => (
  <Select label="Model" id={id} value={model.value} onChange={model.onChange} options={model.names} />
);

function checkTexts(texts, most = TEXTS_MAX) {
  if (!texts.length) throw new RequestError(0, "Write at least one text.");
  if (texts.length > most) throw new RequestError(0, `${texts.length} texts; the picture holds ${most}.`);
}

function notesOf({ vectors, tokens, space, truncated }) {
  const notes = [`${vectors.length} vectors of ${vectors[0].length} numbers`, `${count(tokens)} tokens`];
  if (space) notes.push(`vector space ${space}`);
  if (truncated) notes.push(`truncated: ${truncated}`);
  return notes.join(" · ");
}

const TEXTS = `How do I reset my password?
I forgot my login and cannot get in.
The parcel arrived two days late.
Where is my order?
Bread needs flour, water, salt and yeast.`;

function Embed({ models }) {
  const model = useModel(models, "embed");
  const [text, setText] = useState(TEXTS);
  const action = useAction(async () => {
    const texts = lines(text);
    checkTexts(texts);
    return { texts, ...(await embed(model.value, texts)) };
  });
  return (
    <section aria-labelledby="embed-title">
      <h3 id="embed-title">Embed texts and compare them</h3>
      <form id="embed-form" onSubmit={action.run}>
        <ModelSelect id="embed-model" model={model} />
        <TextArea label="Texts, one a line" id="embed-texts" rows={6} value={text} onInput={setText} />
        <button disabled={action.busy}>Embed</button>
      </form>
      <Answer id="embed-answer" action={action} said={action.outcome && `Done: ${notesOf(action.outcome)}. The cosines follow as a table.`}>
        {action.outcome && (
          <>
            <Note>{notesOf(action.outcome)}</Note>
            <HeatMap caption="Cosine similarity" names={action.outcome.texts.map(shortened)} rows={action.outcome.vectors} />
          </>
        )}
      </Answer>
      <Code samples={embedCode(model.value, lines(text))} />
    </section>
  );
}

const SEARCHED = `Our office is closed on public holidays.
A refund takes five working days to reach your account.
Items can be sent back within 30 days of delivery.
Orders over 50 euros are shipped free of charge.
You can change your address under settings.`;

function Search({ models }) {
  const model = useModel(models, "embed");
  const [query, setQuery] = useState("How long do I have to return an order?");
  const [text, setText] = useState(SEARCHED);
  const action = useAction(async () => {
    const texts = lines(text);
    if (!query.trim()) throw new RequestError(0, "Write a query.");
    checkTexts(texts, SEARCHED_MAX);
    const [asked, found] = await Promise.all([
      embed(model.value, [query.trim()], { input_type: "query" }),
      embed(model.value, texts, { input_type: "document" }),
    ]);
    const hits = texts.map((document, index) => ({ document, score: cosine(asked.vectors[0], found.vectors[index]) }));
    return hits.sort((left, right) => right.score - left.score);
  });
  return (
    <section aria-labelledby="search-title">
      <h3 id="search-title">Search in texts</h3>
      <form id="search-form" onSubmit={action.run}>
        <ModelSelect id="search-model" model={model} />
        <TextField label="Search for" id="search-query" value={query} onInput={setQuery} />
        <TextArea label="Searched texts, one a line" id="search-texts" rows={6} value={text} onInput={setText} />
        <button disabled={action.busy}>Search</button>
      </form>
      <Answer id="search-answer" action={action} said={saidOf(action.outcome)}>
        {action.outcome && <Scores hits={action.outcome} label="Texts by cosine" name="cosine" />}
      </Answer>
      <Code samples={embedCode(model.value, lines(text), { input_type: "document" })} />
    </section>
  );
}

// What a screen reader announces: the outcome in a sentence, in place of its table.
const saidOf = (hits) =>
  hits?.length
    ? `Done: ${hits.length} texts. Best, ${hits[0].score.toFixed(4)}: ${shortened(hits[0].document)}`
    : null;

function Scores({ hits, label, name }) {
  const [least, most] = meterRange(hits.map((hit) => hit.score));
  return (
    <Table
      label={label}
      columns={[["#", "number"], [name, "number"], ["share", "bar"], ["text", "text"]]}
      rows={hits.map((hit, index) => [
        String(index + 1),
        hit.score.toFixed(4),
        <meter min={least} max={most} value={hit.score} aria-hidden="true" />,
        hit.document,
      ])}
    />
  );
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new RequestError(0, `${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

const Thumbnail = ({ image }) => <img src={image.url} alt={image.file.name} title={image.file.name} />;

function Images({ models }) {
  const model = useModel(models, "embed");
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const [text, setText] = useState("a photo of a cat\na photo of a dog\na diagram\na page of text");
  const input = useRef(null);
  function add(files) {
    const added = [...files].filter((file) => file.type.startsWith("image/"));
    const room = IMAGES_MAX - images.length;
    const large = added.filter((file) => file.size > IMAGE_BYTES_MAX).map((file) => file.name);
    const taken = added.filter((file) => file.size <= IMAGE_BYTES_MAX).slice(0, room);
    setImages([...images, ...taken.map((file) => ({ file, url: URL.createObjectURL(file) }))]);
    const problems = [];
    if (large.length) problems.push(`larger than ${IMAGE_BYTES_MAX / 1e6} MB: ${large.join(", ")}`);
    if (added.length - large.length > room) problems.push(`at most ${IMAGES_MAX} images`);
    if (added.length < files.length) problems.push("only images are taken");
    setProblem(problems.join("; "));
  }
  function clear() {
    for (const image of images) URL.revokeObjectURL(image.url);
    setImages([]);
    setProblem("");
    input.current.value = "";
  }
  const action = useAction(async () => {
    const texts = lines(text);
    const shown = images;
    if (!texts.length || !shown.length) throw new RequestError(0, "Choose at least one image, and write at least one text.");
    checkTexts(texts);
    const uris = await Promise.all(shown.map((image) => dataUri(image.file)));
    const found = await embed(model.value, [...texts, ...uris.map((image) => ({ image }))]);
    return { ...found, texts, shown };
  });
  return (
    <section id="images" aria-labelledby="images-title">
      <h3 id="images-title">Compare images with texts</h3>
      <form id="images-form" onSubmit={action.run}>
        <ModelSelect id="images-model" model={model} />
        <div
          id="images-drop"
          onDragOver={(event) => event.preventDefault()}
          onDrop={(event) => {
            event.preventDefault();
            add(event.dataTransfer.files);
          }}
        >
          <label for="images-files">Images, chosen or dropped here</label>
          <input
            id="images-files"
            ref={input}
            type="file"
            accept="image/png,image/jpeg,image/webp,image/gif"
            multiple
            onChange={(event) => add(event.currentTarget.files)}
          />
          <div id="images-chosen">
            {images.map((image) => (
              <Thumbnail image={image} />
            ))}
          </div>
          {images.length > 0 && (
            <button id="images-clear" type="button" onClick={clear}>
              Remove all images
            </button>
          )}
          {problem && (
            <p id="images-problem" class="problem" role="alert">
              {problem}
            </p>
          )}
        </div>
        <TextArea label="Captions, one a line" id="images-texts" value={text} onInput={setText} />
        <button disabled={action.busy}>Compare images</button>
      </form>
      <Answer id="images-answer" action={action} said={action.outcome && `Done: ${notesOf(action.outcome)}. The cosines follow as a table.`}>
        {action.outcome && (
          <>
            <Note>{notesOf(action.outcome)}</Note>
            <HeatMap
              caption="Cosine of each text with each image"
              names={action.outcome.texts.map(shortened)}
              rows={action.outcome.vectors.slice(0, action.outcome.texts.length)}
              columns={action.outcome.vectors.slice(action.outcome.texts.length)}
              heads={action.outcome.shown.map((image) => (
                <Thumbnail image={image} />
              ))}
            />
            <Note>Cosines of texts and images are small for most models; compare them within a row.</Note>
          </>
        )}
      </Answer>
    </section>
  );
}

// It is turned as its EXIF data says, and as the model reads it.
const loadPicture = (file) =>
  createImageBitmap(file).catch(() => {
    throw new RequestError(0, "this browser cannot show the page");
  });

// best: the best cosine of each patch with the chosen tokens, row by row.
function drawPatches(canvas, picture, grid, best) {
  canvas.width = PAGE_WIDTH;
  canvas.height = Math.max(1, Math.round((PAGE_WIDTH * picture.height) / picture.width));
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const [least, most] = [Math.min(...best), Math.max(...best)];
  const [width, height] = [canvas.width / grid.columns, canvas.height / grid.rows];
  best.forEach((value, index) => {
    const depth = most > least ? (value - least) / (most - least) : 0;
    context.fillStyle = `hsl(${240 - 240 * depth} 90% 50% / ${0.15 + 0.4 * depth})`;
    context.fillRect((index % grid.columns) * width, Math.floor(index / grid.columns) * height, width, height);
  });
}

function MarkedPage({ picture, grid, cosines, score }) {
  const canvas = useRef(null);
  const all = "all tokens of the question";
  const names = [all, ...cosines.map((_, index) => `token ${index + 1}`)];
  const [chosen, setChosen] = useState(0);
  const taken = chosen ? [cosines[chosen - 1]] : cosines;
  const best = taken[0].map((_, patch) => Math.max(...taken.map((ofToken) => ofToken[patch])));
  const place = best.indexOf(Math.max(...best));
  useEffect(() => drawPatches(canvas.current, picture, grid, best), [chosen, picture]);
  const row = Math.floor(place / grid.columns) + 1;
  const column = (place % grid.columns) + 1;
  return (
    <>
      <Note>
        {`score ${score.toFixed(3)} · ${grid.rows} × ${grid.columns} patches · ${cosines.length} tokens`}
      </Note>
      <label for="pages-token">Mark by</label>
      <select id="pages-token" value={String(chosen)} onChange={(event) => setChosen(event.currentTarget.selectedIndex)}>
        {names.map((name, index) => (
          <option value={String(index)}>{name}</option>
        ))}
      </select>
      <canvas
        class="page-patches"
        ref={canvas}
        role="img"
        aria-label={`best patch: row ${row} of ${grid.rows}, column ${column} of ${grid.columns}`}
      />
    </>
  );
}

function Pages({ models }) {
  const model = useModel(models, "encode");
  const input = useRef(null);
  const [query, setQuery] = useState("What was the revenue in the last quarter?");
  const action = useAction(async () => {
    const [file] = input.current.files;
    if (!file || !query.trim()) throw new RequestError(0, "Choose a page, and write a question.");
    if (file.size > IMAGE_BYTES_MAX) throw new RequestError(0, `${file.name} is larger than ${IMAGE_BYTES_MAX / 1e6} MB`);
    const uri = await dataUri(file);
    const body = { model: model.value, input: [query.trim(), { image: uri }], encoding_format: "float" };
    const { content } = await send("/v1/multi-vector", { body });
    const [question, page] = content.data;
    const grid = page.patch_grid;
    if (!grid) throw new RequestError(0, "the reply does not say where the patches of the page are");
    const picture = await loadPicture(file);
    const patches = page.embeddings.slice(grid.first, grid.first + grid.rows * grid.columns);
    const cosines = question.embeddings.map((token) => patches.map((patch) => product(token, patch)));
    const score = cosines.reduce((sum, ofToken) => sum + Math.max(...ofToken), 0) / cosines.length;
    return { picture, grid, cosines, score };
  });
  return (
    <section id="pages" aria-labelledby="pages-title">
      <h3 id="pages-title">Find the answer on a page</h3>
      <form id="pages-form" onSubmit={action.run}>
        <ModelSelect id="pages-model" model={model} />
        <div class="field">
          <label for="pages-file">Page, as a picture</label>
          <input id="pages-file" ref={input} type="file" accept="image/png,image/jpeg,image/webp,image/gif" />
        </div>
        <TextField label="Question" id="pages-query" value={query} onInput={setQuery} />
        <button disabled={action.busy}>Mark the page</button>
      </form>
      <Answer id="pages-answer" action={action} said={action.outcome && `Done: score ${action.outcome.score.toFixed(3)}. The marked page follows.`}>
        {action.outcome && <MarkedPage {...action.outcome} />}
      </Answer>
    </section>
  );
}

function Rerank({ models }) {
  const model = useModel(models, "rerank");
  const [query, setQuery] = useState("How long do I have to return an order?");
  const [text, setText] = useState(SEARCHED.split("\n").slice(0, 4).join("\n"));
  const action = useAction(async () => {
    const documents = lines(text);
    if (!query.trim() || !documents.length) throw new RequestError(0, "Write a query and at least one document.");
    const { content } = await send("/v1/rerank", { body: { model: model.value, query: query.trim(), documents } });
    return content.results.map((result) => ({ score: result.relevance_score, document: documents[result.index] }));
  });
  return (
    <section aria-labelledby="rerank-title">
      <h3 id="rerank-title">Rerank documents</h3>
      <form id="rerank-form" onSubmit={action.run}>
        <ModelSelect id="rerank-model" model={model} />
        <TextField label="Query" id="rerank-query" value={query} onInput={setQuery} />
        <TextArea label="Documents, one a line" id="rerank-documents" rows={5} value={text} onInput={setText} />
        <button disabled={action.busy}>Rerank</button>
      </form>
      <Answer id="rerank-answer" action={action} said={saidOf(action.outcome)}>
        {action.outcome && <Scores hits={action.outcome} label="Documents by score" name="score" />}
      </Answer>
      <Code samples={rerankCode(model.value, query.trim(), lines(text))} />
    </section>
  );
}

function Compare({ models }) {
  const names = able(models, "embed").map((model) => model.id);
  const [left, setLeft] = useState(null);
  const chosen = left ?? names.slice(0, 4);
  const [sought, setSought] = useState("");
  const offered = names.filter((name) => name.toLowerCase().includes(sought.trim().toLowerCase()));
  // Chosen models stay in sight, whatever the filter.
  const shown = [...new Set([...chosen, ...offered])].slice(0, Math.max(OFFERED_MAX, chosen.length));
  const [text, setText] = useState("The quick brown fox jumps over the lazy dog.");
  const action = useAction(async () => {
    if (chosen.length < 2 || !text.trim()) throw new RequestError(0, "Write a text, and choose two models or more.");
    return Promise.all(
      chosen.map((name) =>
        embed(name, [text.trim()]).then(
          (reply) => ({ name, ...reply }),
          (error) => ({ name, problem: error.message }),
        ),
      ),
    );
  });
  const replies = action.outcome ?? [];
  const embedded = replies.filter((reply) => reply.vectors);
  const widths = new Set(embedded.map((reply) => reply.vectors[0].length));
  const toggle = (name) =>
    setLeft(chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name]);
  return (
    <section aria-labelledby="compare-title">
      <h3 id="compare-title">One text, several models</h3>
      <form id="compare-form" onSubmit={action.run}>
        <fieldset>
          <legend>Models</legend>
          {names.length > OFFERED_MAX && (
            <TextField label="Filter the models" id="compare-filter" value={sought} onInput={setSought} />
          )}
          {offered.length > shown.length && (
            <Note>
              {count(shown.length)} of {count(offered.length)} models are shown.
            </Note>
          )}
          <div id="compare-models">
            {shown.map((name) => (
              <label>
                <input type="checkbox" name="compared" checked={chosen.includes(name)} onChange={() => toggle(name)} />
                <span>{name}</span>
              </label>
            ))}
          </div>
        </fieldset>
        <TextArea label="Text" id="compare-text" rows={2} value={text} onInput={setText} />
        <button disabled={action.busy}>Compare</button>
      </form>
      <Answer id="compare-answer" action={action} said={action.outcome && `Done: ${embedded.length} of ${replies.length} models. Tables follow.`}>
        {replies.length > 0 && (
          <Region label="Models">
            <table>
              <thead>
                <tr>
                  <th scope="col">model</th>
                  <th scope="col" class="number">
                    width
                  </th>
                  <th scope="col" class="number">
                    tokens
                  </th>
                  <th scope="col">vector space</th>
                </tr>
              </thead>
              <tbody>
                {replies.map((reply) => (
                  <tr>
                    <td class="text">{reply.name}</td>
                    {reply.problem ? (
                      <td class="problem" colSpan={3}>
                        {reply.problem}
                      </td>
                    ) : (
                      <>
                        <td class="number">{count(reply.vectors[0].length)}</td>
                        <td class="number">{count(reply.tokens)}</td>
                        <td>{reply.space ?? NONE}</td>
                      </>
                    )}
                  </tr>
                ))}
              </tbody>
            </table>
          </Region>
        )}
        {embedded.length > 1 && (
          <>
            <HeatMap
              caption="Cosine of the same text"
              names={embedded.map((reply) => reply.name)}
              rows={embedded.map((reply) => reply.vectors[0])}
            />
            {widths.size > 1 && <Note>Vectors of unequal width cannot be compared.</Note>}
            <Note>Only models of the same vector space are expected to agree.</Note>
          </>
        )}
      </Answer>
    </section>
  );
}

// models: of /v1/models, null while they are not known. problem: why, or nothing.
export function Playground({ models, problem, hasKey }) {
  if (!models) {
    return (
      <p id="models-problem" class={hasKey ? "problem" : "note"} role="alert">
        {problem || "Listing the models …"}
      </p>
    );
  }
  const pictured = able(models, "embed_image");
  return (
    <>
      {able(models, "embed").length > 0 && <Embed models={models} />}
      {able(models, "embed").length > 0 && <Search models={models} />}
      {able(pictured, "embed").length > 0 && <Images models={pictured} />}
      {able(pictured, "encode").length > 0 && <Pages models={pictured} />}
      {able(models, "rerank").length > 0 && <Rerank models={models} />}
      {able(models, "embed").length > 1 && <Compare models={models} />}
    </>
  );
}
