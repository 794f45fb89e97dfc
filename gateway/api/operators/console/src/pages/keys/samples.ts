// Code of the first call of a key, which the line in front of curl gives to the environment.
import { embedCode, rerankCode, type Samples } from "../../lib/samples/calls.ts";
import type { Key } from "../../lib/tenants.ts";
import type { Model } from "../../lib/types.ts";

// Of a call that the key may make; null if there is none, as with keys of operators. ofTenant: the models that its
// tenant may use, null for all.
export function firstCallSamples(key: Key, secret: string, models: Model[], ofTenant: string[] | null): Samples | null {
  const allowed = models.filter(({ name }) => [key.models, ofTenant].every((names) => names === null || names.includes(name)));
  const modelFor = (operation: string) => {
    if (key.scopes && !key.scopes.includes(operation)) return undefined;
    // Before the first answer of a server its operations are not known.
    return allowed.find(({ operations }) => operations.includes(operation)) ?? allowed.find(({ operations }) => !operations.length);
  };
  const embedding = modelFor("embed");
  const ranking = modelFor("rerank");
  let samples: Samples | null = null;
  if (embedding) samples = embedCode(embedding.name, ["Hello, world"]);
  else if (ranking) samples = rerankCode(ranking.name, "capital of France", ["Paris", "Berlin"]);
  return samples && { ...samples, curl: `export GATEWAY_API_KEY='${secret}'\n${samples.curl}` };
}
