// The gateway's words about settings, by field. It reports all problems in one message: "nothing has changed:
// upstreams.a.replicas[0]: not a base URL; upstreams.a.model: is missing".
import type { RequestError } from "./api.ts";

const START = "nothing has changed: ";

export interface FieldProblems {
  // By the first key below the entry; "" is the entry itself.
  fields: Map<string, string>;
  // Of the whole request.
  other: string | null;
}

const NONE: FieldProblems = { fields: new Map(), other: null };

// path: of the entry, such as upstreams.a. nested: fields below a section, such as bedrock.region.
export function fieldProblems(problem: RequestError | null, path: string, nested: string[] = []): FieldProblems {
  if (!problem || problem.isKeyMissing) return NONE;
  if (problem.status === 0 && problem.param) return { fields: new Map([[problem.param, problem.message]]), other: null };
  if (!problem.message.startsWith(START + path)) return { fields: new Map(), other: problem.message };
  const fields = new Map<string, string>();
  // A message may contain "; " itself.
  for (const part of problem.message.slice(START.length).split(`; ${path}`)) {
    const text = part.startsWith(path) ? part.slice(path.length) : part;
    const [, whole = "", message = text] = /^(?:\.([^:[]+)[^:]*)?: (.*)$/s.exec(text) ?? [];
    const key = nested.includes(whole) ? whole : (whole.split(".")[0] ?? "");
    fields.set(key, fields.has(key) ? `${fields.get(key)}; ${message}` : message);
  }
  return { fields, other: null };
}

// The words about fields that a form does not show, with their names.
export const unshown = ({ fields }: FieldProblems, shown: string[]) =>
  [...fields].filter(([key]) => !shown.includes(key)).map(([key, text]) => `${key}: ${text}`).join("; ") || null;
