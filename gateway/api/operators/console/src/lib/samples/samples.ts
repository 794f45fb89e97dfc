// Complete programs that send one request, in five languages. The key comes from the environment.
import type { CallRequest } from "../../docs/request.ts";
import { curl } from "./curl.ts";
import { go } from "./go.ts";
import { java } from "./java.ts";
import { python } from "./python.ts";
import { typescript } from "./typescript.ts";

export const samplesOf = (request: CallRequest): Record<string, string> => ({
  curl: curl(request),
  Python: python(request),
  TypeScript: typescript(request),
  Go: go(request),
  Java: java(request),
});
