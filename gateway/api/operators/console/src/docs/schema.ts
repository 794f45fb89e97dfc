// Schemas in words: types, bounds, fields and examples.
import type { ApiDocument, Schema } from "./document.ts";

// An example nests no deeper: schemas may contain themselves.
const DEPTH_MAX = 6;

export type Schemas = ApiDocument["components"]["schemas"];

export const nameOf = (schema: Schema) => schema.$ref?.split("/").at(-1) ?? "";

export function resolve(schema: Schema, schemas: Schemas): Schema {
  return schema.$ref ? { ...schemas[nameOf(schema)], ...(schema.description ? { description: schema.description } : {}) } : schema;
}

// The kinds of values that a schema takes, without null.
export const choicesOf = (schema: Schema) => schema.oneOf?.filter(({ type }) => type !== "null") ?? [schema];

export const isNullable = (schema: Schema) => schema.oneOf?.some(({ type }) => type === "null") ?? false;

export function typeOf(schema: Schema, schemas: Schemas): string {
  const kinds = choicesOf(schema).map((choice) => {
    if (choice.$ref) {
      const target = resolve(choice, schemas);
      return target.enum || target.oneOf ? typeOf({ ...target, $ref: undefined }, schemas) : nameOf(choice);
    }
    if (choice.oneOf) return typeOf(choice, schemas);
    if (choice.type === "array") return `list of ${inner(typeOf(choice.items ?? {}, schemas))}`;
    if (choice.type === "object" && typeof choice.additionalProperties === "object") {
      return `map of ${inner(typeOf(choice.additionalProperties, schemas))}`;
    }
    if (choice.format === "binary" || choice.contentMediaType) return "file";
    return choice.type ?? (choice.enum ? "string" : "any");
  });
  return [...new Set(kinds)].join(" | ");
}

const inner = (type: string) => (type.includes(" | ") ? `(${type})` : type);

// The allowed values of a field, if they are listed.
export function valuesOf(schema: Schema, schemas: Schemas): unknown[] {
  const values = choicesOf(schema).flatMap((choice) => {
    const target = resolve(choice, schemas);
    if (target.const !== undefined) return [target.const];
    if (target.oneOf) return valuesOf(target, schemas);
    return target.enum ?? [];
  });
  return [...new Set(values)].filter((value) => value !== null);
}

// Bounds that are the widest of a type say nothing to a person.
const isPlain = (bound: number | undefined) => bound !== undefined && Math.abs(bound) < 2 ** 53 - 1;

export function boundsOf(schema: Schema): string[] {
  const all = [schema, ...choicesOf(schema)];
  const find = (name: keyof Schema) => all.map((one) => one[name] as number | undefined).find(isPlain);
  const words: string[] = [];
  const [least, greatest] = [find("minimum"), find("maximum")];
  if (least !== undefined && greatest !== undefined) words.push(`${least} to ${greatest}`);
  else if (least !== undefined) words.push(`from ${least}`);
  else if (greatest !== undefined) words.push(`at most ${greatest}`);
  if (find("exclusiveMinimum") !== undefined) words.push(`greater than ${find("exclusiveMinimum")}`);
  if (find("maxLength") !== undefined) words.push(`at most ${find("maxLength")} characters`);
  if (find("minLength")) words.push(`at least ${find("minLength")} characters`);
  if (find("maxItems") !== undefined) words.push(`at most ${find("maxItems")} entries`);
  if (find("minItems")) words.push(`at least ${find("minItems")} entries`);
  return words;
}

// The default of a field: bodies have theirs in words, at the end of the description.
export function defaultOf(schema: Schema): { text: string; value: string | null } {
  const [text = "", value] = (schema.description ?? "").split(/\s*Default: (.*)\.$/s);
  const given = schema.default ?? choicesOf(schema)[0]?.default;
  return { text, value: value ?? (given === undefined || given === null ? null : JSON.stringify(given)) };
}

export interface FieldOf {
  name: string;
  schema: Schema;
  isRequired: boolean;
}

// The fields of an object, or of the objects in a list; those that are required first.
export function fieldsOf(schema: Schema, schemas: Schemas): FieldOf[] {
  const target = resolve(schema, schemas);
  const required = target.required ?? [];
  const own = Object.entries(target.properties ?? {}).map(([name, member]) => ({
    name,
    schema: member,
    isRequired: required.includes(name),
  }));
  return own.sort((one, other) => Number(other.isRequired) - Number(one.isRequired));
}

// The objects inside a schema, each once: name and schema.
export function objectsOf(schema: Schema, schemas: Schemas): [string, Schema][] {
  const found = objectsIn(schema, schemas);
  return found.filter(([name], index) => found.findIndex(([other]) => other === name) === index);
}

function objectsIn(schema: Schema, schemas: Schemas): [string, Schema][] {
  return choicesOf(schema).flatMap((choice): [string, Schema][] => {
    const target = resolve(choice, schemas);
    if (target.oneOf) return objectsIn(target, schemas);
    if (target.type === "array") return objectsIn(target.items ?? {}, schemas);
    if (typeof target.additionalProperties === "object" && !target.properties) return objectsIn(target.additionalProperties, schemas);
    return target.properties ? [[nameOf(choice), choice]] : [];
  });
}

// A value that has the form of a schema.
export function exampleOf(schema: Schema, schemas: Schemas, name = "", depth = 0): unknown {
  const choice = choicesOf(schema)[0];
  if (!choice || depth > DEPTH_MAX) return null;
  const target = resolve(choice, schemas);
  if (target.const !== undefined) return target.const;
  if (target.default !== undefined && target.default !== null) return target.default;
  if (target.enum) return target.enum.find((value) => value !== null) ?? null;
  if (target.oneOf) return exampleOf(target, schemas, name, depth + 1);
  if (target.type === "array") {
    if (choicesOf(target.items ?? {}).some(({ type }) => type === "number")) return [0.0213, -0.0471, 0.0382];
    return [exampleOf(target.items ?? {}, schemas, name, depth + 1)];
  }
  if (target.properties) {
    const members = Object.entries(target.properties).filter(([, member]) => choicesOf(member).length > 0);
    return Object.fromEntries(members.map(([key, member]) => [key, exampleOf(member, schemas, key, depth + 1)]));
  }
  if (target.type === "object") return {};
  if (target.type === "integer") return name.endsWith("_at") || name === "created" ? 1_790_000_000 : name === "index" ? 0 : 1;
  if (target.type === "number") return 0.83;
  if (target.type === "boolean") return true;
  return target.type === "string" ? (name === "model" ? "bge" : "text") : null;
}
