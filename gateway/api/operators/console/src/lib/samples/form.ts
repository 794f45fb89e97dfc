// The fields of a form with a file, as the samples name them.
import type { Form } from "../../docs/request.ts";

export interface FormFields {
  texts: [string, string][];
  // Field and name of the file.
  file: [string, string];
}

export function fieldsOf(form: Form): FormFields {
  const entries = Object.entries(form);
  const file = entries.find(([, value]) => value instanceof File);
  return {
    texts: entries.filter((entry): entry is [string, string] => typeof entry[1] === "string" && entry[1] !== ""),
    file: file ? [file[0], (file[1] as File).name] : ["file", "requests.jsonl"],
  };
}
