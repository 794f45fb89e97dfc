// The form of an added upstream: which fields each kind of server has, and the way to its settings and back.
import { type Addition, furtherSettings, parsedSettings } from "../../lib/additions.ts";

export const BACKENDS: [value: string, title: string][] = [
  ["tei", "Text Embeddings Inference"],
  ["infinity", "Infinity"],
  ["vllm", "vLLM"],
  ["openai", "OpenAI's API, or a server like it"],
  ["cohere", "Cohere"],
  ["jina", "Jina"],
  ["voyage", "Voyage"],
  ["torch", "This gateway's own engine"],
];
const SERVERS = ["tei", "infinity", "vllm", "openai"];
const HOSTED: Record<string, string> = {
  cohere: "https://api.cohere.com/v2",
  jina: "https://api.jina.ai/v1",
  voyage: "https://api.voyageai.com/v1",
};
const REMOTE = [...SERVERS, ...Object.keys(HOSTED)];
const ALL = [...REMOTE, "torch"];

export interface FormField {
  // Of the settings.
  key: string;
  label: (backend: string) => string;
  hint?: (backend: string) => string | undefined;
  kind: "text" | "lines" | "number" | "check" | "choice";
  options?: [value: string, title: string][];
  backends: string[];
  // Shown under "More settings".
  isRare?: boolean;
}

export const FIELDS: FormField[] = [
  {
    key: "replicas",
    label: (backend) => (backend in HOSTED ? "Address" : "Addresses of its replicas, one a line"),
    hint: (backend) => (HOSTED[backend] ? `empty: ${HOSTED[backend]}` : "such as http://10.0.0.5:8080; all serve the same model"),
    kind: "lines",
    backends: REMOTE,
  },
  {
    key: "model",
    label: (backend) => (backend === "torch" ? "Checkpoint" : "Model at the server"),
    hint: (backend) => (backend === "torch" ? "a hub id, or a path on the gateway's host" : undefined),
    kind: "text",
    backends: ALL.filter((backend) => backend !== "tei"),
  },
  {
    key: "api_key",
    label: () => "API key of the server",
    hint: () => "a reference, not the key: ${UPSTREAM_KEY}, or ${file:name} below admin.files",
    kind: "text",
    backends: REMOTE,
  },
  {
    key: "tokenizer",
    label: () => "Tokenizer",
    hint: () => "a hub id or a path, to count and cut tokens here",
    kind: "text",
    backends: REMOTE,
  },
  { key: "device", label: () => "Device", hint: () => "such as cuda:0; empty: the best one", kind: "text", backends: ["torch"] },
  { key: "dtype", label: () => "Type of numbers", hint: () => "such as float16", kind: "text", backends: ["torch"] },
  { key: "revision", label: () => "Revision", hint: () => "a commit or tag of the checkpoint", kind: "text", backends: ["torch"], isRare: true },
  {
    key: "in_flight_batches",
    label: () => "Window: batches in flight to a replica",
    hint: () => "empty: learned",
    kind: "number",
    backends: ALL,
    isRare: true,
  },
  {
    key: "attempt_timeout_s",
    label: () => "Seconds until an attempt is given up",
    hint: () => "empty: 30",
    kind: "number",
    backends: ALL,
    isRare: true,
  },
  {
    key: "when_unavailable",
    label: () => "While no replica is in use",
    kind: "choice",
    options: [
      ["", "refuse calls"],
      ["wait", "let calls wait"],
    ],
    backends: REMOTE,
    isRare: true,
  },
  {
    key: "discover",
    label: () => "Every address that the name resolves to is a replica",
    kind: "check",
    backends: SERVERS,
    isRare: true,
  },
];

export interface UpstreamForm {
  name: string;
  backend: string;
  // A name for callers; "" for none.
  serve: string;
  // By key of the settings.
  values: Record<string, string>;
  // JSON.
  more: string;
}

export const EMPTY: UpstreamForm = { name: "", backend: "tei", serve: "", values: {}, more: "" };

export const fieldsOf = (backend: string) => FIELDS.filter(({ backends }) => backends.includes(backend));

function valueOf({ kind }: FormField, text: string): unknown {
  if (kind === "lines") return text.split(/[\n,]/).map((line) => line.trim()).filter(Boolean);
  if (kind === "number") return Number(text);
  return kind === "check" ? "dns" : text;
}

// Raises: RequestError.
export function settingsOf({ backend, values, more }: UpstreamForm): Record<string, unknown> {
  const written = fieldsOf(backend)
    .map((field) => [field, (values[field.key] ?? "").trim()] as const)
    .filter(([, text]) => text)
    .map(([field, text]) => [field.key, valueOf(field, text)]);
  return { ...parsedSettings(more), backend, ...Object.fromEntries(written) };
}

const isPlain = (value: unknown) =>
  typeof value === "string" || typeof value === "number" || (Array.isArray(value) && value.every((each) => typeof each === "string"));

export function formOf({ name, settings }: Addition): UpstreamForm {
  const backend = String(settings.backend);
  const own = fieldsOf(backend).filter(({ key, kind }) => {
    const value = settings[key];
    return isPlain(value) && Array.isArray(value) === (kind === "lines");
  });
  const text = (value: unknown) => (Array.isArray(value) ? value.join("\n") : String(value));
  return {
    name,
    backend,
    serve: "",
    values: Object.fromEntries(own.map(({ key }) => [key, text(settings[key])])),
    more: furtherSettings(settings, ["backend", ...own.map(({ key }) => key)]),
  };
}
