// Search over paths, summaries, descriptions, and the fields of requests and answers. Every word of a query has to be
// found; the places of the words rank the operations.
import type { ApiDocument, Operation, Schema } from "./document.ts";
import { choicesOf, nameOf, resolve, type Schemas } from "./schema.ts";

const RESULTS_MAX = 30;
const DEPTH_MAX = 5;

interface Entry {
  operation: Operation;
  paths: string[];
  summary: string;
  description: string;
  // Field → its meaning. Those of answers count less.
  fields: Map<string, string>;
  answered: Map<string, string>;
}

export interface Result {
  operation: Operation;
  // The path that was found, of several.
  path: string;
  // Where the last word was found, other than in the path or the summary.
  field: string;
  meaning: string;
}

function collect(schema: Schema, schemas: Schemas, into: Map<string, string>, seen = new Set<string>(), depth = 0) {
  for (const choice of choicesOf(schema)) {
    const name = nameOf(choice);
    if (seen.has(name) || depth > DEPTH_MAX) continue;
    if (name) seen.add(name);
    const target = resolve(choice, schemas);
    for (const part of [target.items, target.oneOf && { oneOf: target.oneOf }]) {
      if (part) collect(part, schemas, into, seen, depth + 1);
    }
    for (const [field, member] of Object.entries(target.properties ?? {})) {
      if (!into.has(field)) into.set(field, member.description ?? "");
      collect(member, schemas, into, seen, depth + 1);
    }
  }
}

export function indexOf(document: ApiDocument, operations: Operation[]): Entry[] {
  const { schemas } = document.components;
  return operations.map((operation) => {
    const { raw } = operation;
    const fields = new Map<string, string>();
    const answered = new Map<string, string>();
    for (const { name, description, schema } of raw.parameters ?? []) fields.set(name, description ?? schema.description ?? "");
    for (const { schema } of Object.values(raw.requestBody?.content ?? {})) if (schema) collect(schema, schemas, fields);
    for (const [status, answer] of Object.entries(raw.responses)) {
      if (!status.startsWith("2")) continue;
      for (const { schema } of Object.values(answer.content ?? {})) if (schema) collect(schema, schemas, answered);
    }
    const description = (raw.description ?? "").toLowerCase();
    return { operation, paths: operation.aliases, summary: raw.summary.toLowerCase(), description, fields, answered };
  });
}

function scorePath(path: string, word: string) {
  const text = path.toLowerCase();
  if (text === word || text === `/${word}`) return 120;
  const parts = text.split(/[/:{}]/);
  if (parts.includes(word.replace(/^\//, ""))) return 90 - path.length / 10;
  if (text.startsWith(word)) return 80 - path.length / 10;
  return text.includes(word) ? 55 - path.length / 10 : 0;
}

const beginsWord = (text: string, word: string) => text.startsWith(word) || new RegExp(`[^a-z0-9]${word.replace(/[^\w]/g, "\\$&")}`).test(text);

function scoreFields(fields: Map<string, string>, word: string): [number, string] {
  let best: [number, string] = [0, ""];
  for (const [field, meaning] of fields) {
    const name = field.toLowerCase();
    const score = name === word ? 50 : name.startsWith(word) ? 38 : name.includes(word) ? 30 : meaning.toLowerCase().includes(word) ? 12 : 0;
    if (score > best[0]) best = [score, field];
  }
  return best;
}

function rank(entry: Entry, words: string[]): [number, Result] | null {
  const result: Result = { operation: entry.operation, path: entry.operation.path, field: "", meaning: "" };
  let total = 0;
  for (const word of words) {
    const paths = entry.paths.map((path) => [scorePath(path, word), path] as const).sort((one, other) => other[0] - one[0]);
    const [path = 0, found = ""] = paths[0] ?? [];
    const summary = beginsWord(entry.summary, word) ? 45 : entry.summary.includes(word) ? 25 : 0;
    const [field, name] = scoreFields(entry.fields, word);
    const [answered, answeredName] = scoreFields(entry.answered, word);
    const method = entry.operation.method.toLowerCase() === word ? 20 : 0;
    const description = entry.description.includes(word) ? 15 : 0;
    const tag = entry.operation.tag.toLowerCase().includes(word) ? 28 : 0;
    const score = Math.max(path, summary, field, answered * 0.6, description, method, tag);
    if (!score) return null;
    if (score === path) result.path = found;
    else if (score === field) [result.field, result.meaning] = [name, entry.fields.get(name) ?? ""];
    else if (score === answered * 0.6) [result.field, result.meaning] = [answeredName, entry.answered.get(answeredName) ?? ""];
    total += score;
  }
  return [total, result];
}

export function search(index: Entry[], query: string): Result[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const found = index.map((entry) => rank(entry, words)).filter((ranked) => ranked !== null);
  found.sort((one, other) => other[0] - one[0]);
  return found.slice(0, RESULTS_MAX).map(([, result]) => result);
}
