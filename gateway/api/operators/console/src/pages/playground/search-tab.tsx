// Searches a file, or lines that are typed: the passages are embedded once, and each query after that is one call.
import { useRef, useState } from "preact/hooks";
import { RequestError } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { embedCode } from "../../lib/samples/calls.ts";
import { type CallFacts, cosine, embed, linesOf } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { TextArea, TextField } from "../../ui/field.tsx";
import { Note } from "../../ui/states.tsx";
import { Facts } from "./facts.tsx";
import { FileField } from "./file-field.tsx";
import { TryForm } from "./form.tsx";
import { ModelSelect } from "./model-select.tsx";
import { useModel } from "./models.ts";
import { FILE_BYTES_MAX, type Passage, passagesOf } from "./passages.ts";
import { saidOf, Scores } from "./scores.tsx";

const CHUNK = 128;
const SEARCHED = `Our office is closed on public holidays.
A refund takes five working days to reach your account.
Items can be sent back within 30 days of delivery.
Orders over 50 euros are shipped free of charge.
You can change your address under settings.`;

interface Index {
  identity: string;
  passages: Passage[];
  rows: number[][];
}

export function SearchTab({ models }: { models: ListedModel[] }) {
  const model = useModel(models, "embed");
  const [query, setQuery] = useState("How long do I have to return an order?");
  const [text, setText] = useState(SEARCHED);
  const [file, setFile] = useState<File | null>(null);
  const [done, setDone] = useState("");
  const index = useRef<Index | null>(null);

  async function passages() {
    if (!file) return linesOf(text).map((line, at) => ({ text: line, place: `line ${at + 1}` }));
    if (file.size > FILE_BYTES_MAX) throw new RequestError(0, `${file.name} is larger than ${FILE_BYTES_MAX / 1e6} MB.`);
    return passagesOf(file.name, await file.text());
  }

  // Tokens of the passages that were not embedded before.
  async function prepare(): Promise<{ found: Index; tokens: number; truncated: number }> {
    const identity = `${model.value}\n${file ? `${file.name} ${file.size} ${file.lastModified}` : text}`;
    if (index.current?.identity === identity) return { found: index.current, tokens: 0, truncated: 0 };
    const all = await passages();
    if (!all.length) throw new RequestError(0, "Write at least one text, or choose a file.");
    const rows: number[][] = [];
    let [tokens, truncated] = [0, 0];
    for (let at = 0; at < all.length; at += CHUNK) {
      setDone(`${at} of ${all.length} passages are embedded`);
      const chunk = all.slice(at, at + CHUNK).map((passage) => passage.text);
      const reply = await embed(model.value, chunk, { input_type: "document" });
      rows.push(...reply.rows);
      tokens += reply.tokens ?? 0;
      truncated += reply.truncated;
    }
    setDone("");
    index.current = { identity, passages: all, rows };
    return { found: index.current, tokens, truncated };
  }

  const action = useAction(async () => {
    if (!query.trim()) throw new RequestError(0, "Write a query.");
    const startedMs = performance.now();
    const { found, tokens, truncated } = await prepare();
    const asked = await embed(model.value, [query.trim()], { input_type: "query" });
    const vector = asked.rows[0] ?? [];
    const hits = found.passages.map((passage, at) => ({ ...passage, score: cosine(vector, found.rows[at] ?? []) }));
    const facts: CallFacts = { ...asked, tokens: (asked.tokens ?? 0) + tokens, truncated: asked.truncated + truncated };
    facts.elapsedMs = performance.now() - startedMs;
    return { model: model.value, hits: hits.sort((left, right) => right.score - left.score), facts, isNew: tokens > 0 };
  });
  const { outcome } = action;
  return (
    <TryForm
      id="search"
      title="Search a file"
      note="Passages are embedded once; each further query is one call."
      verb="Search"
      action={action}
      said={saidOf(outcome?.hits)}
      samples={embedCode(model.value, linesOf(text), { input_type: "document" })}
      fields={
        <>
          <ModelSelect model={model} />
          <TextField label="Search for" value={query} onInput={setQuery} />
          <FileField
            label="File"
            hint="Text, Markdown, CSV or JSON Lines of up to 4 MB; it is read in this browser."
            accept=".txt,.md,.csv,.tsv,.jsonl,.ndjson,text/plain"
            file={file}
            onChange={setFile}
          />
          {!file && <TextArea label="Or texts, one a line" rows={6} value={text} onInput={setText} />}
          {done && <Note>{done}</Note>}
        </>
      }
    >
      {outcome && (
        <>
          <Facts model={outcome.model} facts={outcome.facts} />
          {!outcome.isNew && <Note>The passages were embedded before: only the query was sent.</Note>}
          <Scores hits={outcome.hits} name="cosine" />
        </>
      )}
    </TryForm>
  );
}
