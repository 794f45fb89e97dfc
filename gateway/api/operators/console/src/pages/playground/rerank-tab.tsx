// Documents, ordered by how well they answer a query.
import { useState } from "preact/hooks";
import { RequestError, send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { rerankCode } from "../../lib/samples/calls.ts";
import { factsOf, linesOf } from "../../lib/vectors.ts";
import type { ListedModel } from "../../shell/access.ts";
import { TextArea, TextField } from "../../ui/field.tsx";
import { Facts } from "./facts.tsx";
import { TryForm } from "./form.tsx";
import { ModelSelect } from "./model-select.tsx";
import { useModel } from "./models.ts";
import { saidOf, Scores } from "./scores.tsx";

const DOCUMENTS = `Our office is closed on public holidays.
A refund takes five working days to reach your account.
Items can be sent back within 30 days of delivery.
Orders over 50 euros are shipped free of charge.`;

interface RerankReply {
  results: { index: number; relevance_score: number }[];
  usage?: { total_tokens?: number };
  meta?: { billed_units?: { total_tokens?: number }; tokens?: { input_tokens?: number } };
}

export function RerankTab({ models }: { models: ListedModel[] }) {
  const model = useModel(models, "rerank");
  const [query, setQuery] = useState("How long do I have to return an order?");
  const [text, setText] = useState(DOCUMENTS);
  const action = useAction(async () => {
    const documents = linesOf(text);
    if (!query.trim() || !documents.length) throw new RequestError(0, "Write a query and at least one document.");
    const body = { model: model.value, query: query.trim(), documents };
    const { content, headers, elapsedMs } = await send<RerankReply>("/v1/rerank", { body });
    const tokens = content.usage?.total_tokens ?? content.meta?.tokens?.input_tokens ?? null;
    const hits = content.results.map(({ index, relevance_score }) => ({ score: relevance_score, text: documents[index] ?? "" }));
    return { model: model.value, hits, facts: factsOf(headers, elapsedMs, tokens) };
  });
  const { outcome } = action;
  return (
    <TryForm
      id="rerank"
      title="Rerank documents"
      verb="Rerank"
      action={action}
      said={saidOf(outcome?.hits)}
      samples={rerankCode(model.value, query.trim(), linesOf(text))}
      fields={
        <>
          <ModelSelect model={model} />
          <TextField label="Query" value={query} onInput={setQuery} />
          <TextArea label="Documents, one a line" rows={7} value={text} onInput={setText} />
        </>
      }
    >
      {outcome && (
        <>
          <Facts model={outcome.model} facts={outcome.facts} />
          <Scores hits={outcome.hits} name="score" />
        </>
      )}
    </TryForm>
  );
}
