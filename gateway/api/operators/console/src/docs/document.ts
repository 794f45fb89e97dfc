// The OpenAPI document as this page reads it: only the parts that it shows.
export interface Schema {
  $ref?: string;
  type?: string;
  title?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  oneOf?: Schema[];
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  format?: string;
  contentMediaType?: string;
  additionalProperties?: Schema | boolean;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  minLength?: number;
  maxLength?: number;
  minItems?: number;
  maxItems?: number;
}

export interface Parameter {
  name: string;
  in: "path" | "query" | "header";
  required?: boolean;
  schema: Schema;
  description?: string;
}

export interface Media {
  schema?: Schema;
  example?: unknown;
}

export interface Answer {
  description: string;
  content?: Record<string, Media>;
}

export interface RawOperation {
  tags: string[];
  summary: string;
  description?: string;
  operationId: string;
  parameters?: Parameter[];
  requestBody?: { content: Record<string, Media>; required?: boolean };
  responses: Record<string, Answer>;
  security?: Record<string, unknown>[];
}

export interface ErrorKind {
  meaning: string;
  source: string;
  retryable: boolean;
}

export interface ApiDocument {
  info: { title: string; version: string };
  tags: { name: string; description: string }[];
  paths: Record<string, Record<string, RawOperation>>;
  components: {
    schemas: Record<string, Schema>;
    securitySchemes: Record<string, { type: string; scheme?: string; name?: string; description?: string }>;
  };
  "x-error-kinds": Record<string, ErrorKind>;
  "x-error-bodies": Record<string, Record<string, unknown>>;
}

// A handler of the gateway: one method, and every path at which it answers in the same way.
export interface Operation {
  // Such as "POST/v1/embeddings": its place in the address of the page.
  id: string;
  method: string;
  path: string;
  aliases: string[];
  tag: string;
  raw: RawOperation;
  needsKey: boolean;
}

const TIMEOUT_MS = 60_000;

export async function fetchDocument(address: string): Promise<ApiDocument> {
  const reply = await fetch(address, { credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!reply.ok) throw new Error(`the gateway answered with status ${reply.status}`);
  return reply.json();
}

// Of several paths, the one that callers write first: with a version, and without a model in it.
const place = (path: string) => (path.startsWith("/models/{") ? 2 : 0) + (/^\/v\d/.test(path) ? 0 : 1);

// The operations in the order of the document, with equal ones joined.
export function operationsOf(document: ApiDocument): Operation[] {
  const found = new Map<string, Operation>();
  for (const [path, item] of Object.entries(document.paths)) {
    for (const [method, raw] of Object.entries(item)) {
      const parameters = raw.parameters?.filter((parameter) => parameter.in !== "path");
      const { tags, summary, description, requestBody, responses, security } = raw;
      const content = JSON.stringify([method, tags, summary, description, parameters ?? [], requestBody, responses, security]);
      const known = found.get(content);
      if (known) {
        known.aliases.push(path);
        continue;
      }
      found.set(content, {
        id: "",
        method: method.toUpperCase(),
        path,
        aliases: [path],
        tag: raw.tags[0] ?? "",
        raw,
        needsKey: !raw.security?.some((scheme) => Object.keys(scheme).length === 0),
      });
    }
  }
  const order = document.tags.map(({ name }) => name);
  const operations = [...found.values()].sort((one, other) => order.indexOf(one.tag) - order.indexOf(other.tag));
  for (const operation of operations) {
    operation.aliases.sort((one, other) => place(one) - place(other));
    operation.path = operation.aliases[0] ?? "";
    operation.id = operation.method + operation.path;
  }
  return operations;
}
