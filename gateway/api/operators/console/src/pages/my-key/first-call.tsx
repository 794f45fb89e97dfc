// Code for a first call of a model that the key may use, in five languages.
import { useParam } from "../../lib/route.ts";
import { embedCode, rerankCode } from "../../lib/samples/calls.ts";
import type { ListedModel } from "../../shell/access.ts";
import { Card } from "../../ui/card.tsx";
import { Code } from "../../ui/code.tsx";
import { Select } from "../../ui/field.tsx";
import { Empty } from "../../ui/states.tsx";
import { able } from "../playground/models.ts";

export function FirstCall({ models, scopes }: { models: ListedModel[]; scopes: string[] }) {
  const [wanted, setWanted] = useParam("model");
  const embedding = scopes.includes("embed") ? able(models, "embed") : [];
  const ranking = scopes.includes("rerank") ? able(models, "rerank") : [];
  const names = [...new Set([...embedding, ...ranking].map(({ id }) => id))];
  const model = names.includes(wanted) ? wanted : (names[0] ?? "");
  const canEmbed = embedding.some(({ id }) => id === model);
  return (
    <Card
      title="Make a call"
      note="Set GATEWAY_API_KEY to the key, and run one of these"
      id="first-call"
      actions={names.length > 1 && <Select label="Model" value={model} onChange={setWanted} options={names} />}
    >
      {model ? (
        <Code
          samples={
            canEmbed
              ? embedCode(model, ["The quick brown fox"])
              : rerankCode(model, "Which animal is quick?", ["The quick brown fox", "A sleeping dog"])
          }
        />
      ) : (
        <Empty title="No model can be called with this key now">Ask the operator for a model, or for the scope embed.</Empty>
      )}
    </Card>
  );
}
