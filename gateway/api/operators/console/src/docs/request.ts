// One request as a form describes it: what is sent, and what the samples of code show.
import type { Operation, Parameter, Schema } from "./document.ts";
import { exampleOf, resolve, type Schemas } from "./schema.ts";

export type Form = Record<string, string | File>;

export interface CallRequest {
  method: string;
  // Scheme, host, and the prefix of a proxy, if there is one.
  base: string;
  // With its query.
  path: string;
  // JSON, or none.
  body: string | null;
  // A form with a file, or none.
  form: Form | null;
  needsKey: boolean;
  // The path without names in it, as the document has it.
  template: string;
}

export interface Draft {
  path: string;
  values: Record<string, string>;
  body: string;
  form: Form;
}

// In place of the documentation's models, which this gateway may not have.
export const PLACEHOLDER = "YOUR_MODEL";
export const JSON_TYPE = "application/json";
export const FORM_TYPE = "multipart/form-data";

export const bodyOf = (operation: Operation) => operation.raw.requestBody?.content ?? {};

export function formSchemaOf(operation: Operation, schemas: Schemas): Schema | undefined {
  const schema = bodyOf(operation)[FORM_TYPE]?.schema;
  return schema && resolve(schema, schemas);
}

// The parameters of one path of an operation: names in the path differ between its paths.
export function parametersOf(operation: Operation, path: string): Parameter[] {
  const names = [...path.matchAll(/\{(\w+)\}/g)].map(([, name = ""]) => name);
  const inPath = names.map((name): Parameter => {
    const known = operation.raw.parameters?.find((parameter) => parameter.in === "path" && parameter.name === name);
    return known ?? { name, in: "path", required: true, schema: { type: "string" } };
  });
  return [...inPath, ...(operation.raw.parameters ?? []).filter((parameter) => parameter.in !== "path")];
}

// Which operation a model has to offer to answer a path.
export function workOf(path: string) {
  if (/rank|score/.test(path)) return "rerank";
  return /classify|predict/.test(path) ? "classify" : "embed";
}

export function draftOf(operation: Operation, path: string, schemas: Schemas): Draft {
  const media = bodyOf(operation)[JSON_TYPE];
  const example = media && (media.example ?? exampleOf(media.schema ?? {}, schemas));
  const text = example === undefined ? "" : JSON.stringify(example, null, 2);
  const isCall = operation.method === "POST" && !path.includes("/admin");
  const body = isCall ? text.replace(/("model": "(?:models\/)?)[^"\\]*"/g, `$1${PLACEHOLDER}"`) : text;
  return { path, values: {}, body, form: {} };
}

export class FormError extends Error {}

// isSample: names that are missing stay in braces.
export function requestOf(operation: Operation, draft: Draft, base: string, isSample: boolean): CallRequest {
  const query = new URLSearchParams();
  let path = draft.path;
  for (const { name, in: where, required } of parametersOf(operation, draft.path)) {
    const value = draft.values[name]?.trim() ?? "";
    if (where === "path") {
      if (value) path = path.replace(`{${name}}`, value.split("/").map(encodeURIComponent).join("/"));
      else if (!isSample) throw new FormError(`\`${name}\` is a part of the path: type a value for it`);
    } else if (value) query.set(name, value);
    else if (required && !isSample) throw new FormError(`\`${name}\` is required`);
  }
  const hasBody = JSON_TYPE in bodyOf(operation);
  if (hasBody && !isSample) {
    try {
      JSON.parse(draft.body);
    } catch (error) {
      throw new FormError(`the body is not JSON: ${(error as Error).message}`);
    }
  }
  const text = query.toString();
  return {
    method: operation.method,
    base,
    path: text ? `${path}?${text}` : path,
    body: hasBody ? draft.body.trim() : null,
    form: FORM_TYPE in bodyOf(operation) ? draft.form : null,
    needsKey: operation.needsKey,
    template: draft.path,
  };
}
