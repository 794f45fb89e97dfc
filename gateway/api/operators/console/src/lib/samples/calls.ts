// Code that embeds or ranks texts by a model of this gateway.
import { samplesOf } from "./samples.ts";

const LONG = 20;

export type Samples = Record<string, string>;

const post = (path: string, body: object): Samples =>
  samplesOf({
    method: "POST",
    base: location.origin,
    path,
    body: JSON.stringify(body, null, 2),
    form: null,
    needsKey: true,
    template: path,
  });

export const embedCode = (model: string, texts: string[], more: Record<string, unknown> = {}) =>
  post("/v1/embeddings", { model, input: texts.slice(0, LONG), ...more });

export const rerankCode = (model: string, query: string, texts: string[]) =>
  post("/v1/rerank", { model, query, documents: texts.slice(0, LONG) });
