// Code that calls a model.
import type { Model } from "../../lib/types.ts";
import { embedCode, rerankCode } from "../../lib/samples/calls.ts";
import { Card } from "../../ui/card.tsx";
import { Code } from "../../ui/code.tsx";

export function Calling({ model: { name, operations } }: { model: Model }) {
  const embeds = operations.includes("embed") || !operations.length;
  const ranks = operations.includes("rerank");
  return (
    <>
      {embeds && (
        <Card title="Embed texts with it" span={ranks ? 6 : 12}>
          <Code samples={embedCode(name, ["What is a vector?", "A list of numbers."])} />
        </Card>
      )}
      {ranks && (
        <Card title="Rank documents with it" span={embeds ? 6 : 12}>
          <Code samples={rerankCode(name, "What is a vector?", ["A list of numbers.", "A kind of fish."])} />
        </Card>
      )}
    </>
  );
}
