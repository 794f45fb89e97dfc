// The form of an added upstream: which fields each kind of server has, and the way to its settings and back.
import { type Addition, furtherSettings, parsedSettings } from "../../lib/additions.ts";

export const BACKENDS: [value: string, title: string][] = [
  ["tei", "Text Embeddings Inference"],
  ["infinity", "Infinity"],
  ["vllm", "vLLM"],
  ["nim", "NVIDIA NIM"],
  ["openai", "OpenAI's API: a vendor, or a server like it"],
  ["azure", "Azure OpenAI"],
  ["bedrock", "Amazon Bedrock"],
  ["cohere", "Cohere"],
  ["gemini", "Gemini API"],
  ["vertex", "Vertex AI"],
  ["huggingface", "Hugging Face's inference"],
  ["jina", "Jina"],
  ["perplexity", "Perplexity"],
  ["voyage", "Voyage"],
  ["watsonx", "watsonx.ai"],
  ["torch", "This gateway's own engine"],
];
const SERVERS = ["tei", "infinity", "vllm", "nim", "openai"];
// Addresses that an empty field stands for.
const HOSTED: Record<string, string> = {
  bedrock: "that of the region",
  cohere: "https://api.cohere.com/v2",
  gemini: "https://generativelanguage.googleapis.com/v1beta",
  huggingface: "https://router.huggingface.co/hf-inference/models",
  jina: "https://api.jina.ai/v1",
  perplexity: "https://api.perplexity.ai/v1",
  vertex: "that of the location",
  voyage: "https://api.voyageai.com/v1",
  watsonx: "that of the region",
};
const REMOTE = [...SERVERS, "azure", ...Object.keys(HOSTED)];
const ALL = [...REMOTE, "torch"];
const REPLICAS: Record<string, string> = {
  azure: "such as https://name.openai.azure.com",
  nim: "such as http://10.0.0.5:8000; empty for NVIDIA's own service",
  openai: "such as http://10.0.0.5:8080; all serve the same model; empty for a vendor's own",
};
const KEYS: Record<string, string> = {
  bedrock: "; empty: the credentials of the gateway's machine, at Amazon's own address only",
  vertex: ", to an access token; empty: the credentials of the gateway's machine, at Google's own address only",
};
const TASKS: [string, string][] = [
  ["embed", "embed"],
  ["rerank", "rerank"],
];
const VENDORS = ["deepinfra", "fireworks", "mistral", "nebius", "openai", "openrouter", "siliconflow", "together"];

export interface FormField {
  // Of the settings; that of the section of a kind has a dot.
  key: string;
  label: (backend: string) => string;
  hint?: (backend: string) => string | undefined;
  kind: "text" | "lines" | "number" | "check" | "choice";
  options?: [value: string, title: string][];
  // What a check writes.
  checked?: unknown;
  backends: string[];
  // Shown under "More settings".
  isRare?: boolean;
}

export const FIELDS: FormField[] = [
  {
    key: "vendor",
    label: () => "Vendor",
    kind: "choice",
    options: [["", "none, or known by the address"], ...VENDORS.map((name): [string, string] => [name, name])],
    backends: ["openai"],
  },
  {
    key: "replicas",
    label: (backend) => (backend in HOSTED ? "Address" : "Addresses of its replicas, one a line"),
    hint: (backend) =>
      HOSTED[backend] ? `empty: ${HOSTED[backend]}` : (REPLICAS[backend] ?? "such as http://10.0.0.5:8080; all serve the same model"),
    kind: "lines",
    backends: REMOTE,
  },
  {
    key: "model",
    label: (backend) => ({ torch: "Checkpoint", azure: "Deployment" })[backend] ?? "Model at the server",
    hint: (backend) => (backend === "torch" ? "a hub id, or a path on the gateway's host" : undefined),
    kind: "text",
    backends: ALL.filter((backend) => backend !== "tei"),
  },
  {
    key: "api_key",
    label: () => "API key of the server",
    hint: (backend) => `a reference, not the key: \${UPSTREAM_KEY}, or \${file:name} below admin.files${KEYS[backend] ?? ""}`,
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
  {
    key: "bedrock.region",
    label: () => "Region",
    hint: () => "such as us-east-1",
    kind: "text",
    backends: ["bedrock"],
  },
  {
    key: "bedrock.profile",
    label: () => "Profile of AWS' files",
    hint: () => "empty: as AWS' own tools choose",
    kind: "text",
    backends: ["bedrock"],
    isRare: true,
  },
  {
    key: "bedrock.family",
    label: () => "Model behind an inference profile",
    hint: () => "such as cohere.embed-v4, if the ARN does not name it",
    kind: "text",
    backends: ["bedrock"],
    isRare: true,
  },
  { key: "vertex.project", label: () => "Project", hint: () => "the id of the project that is billed", kind: "text", backends: ["vertex"] },
  { key: "vertex.location", label: () => "Location", hint: () => "such as europe-west4; empty: global", kind: "text", backends: ["vertex"] },
  {
    key: "vertex.credentials",
    label: () => "File of credentials",
    hint: () => "below admin.files; empty: the default credentials of the gateway's machine",
    kind: "text",
    backends: ["vertex"],
    isRare: true,
  },
  {
    key: "watsonx.region",
    label: () => "Region",
    hint: () => "such as eu-de; empty: us-south",
    kind: "text",
    backends: ["watsonx"],
  },
  { key: "watsonx.project_id", label: () => "Project", hint: () => "that is billed, or a space", kind: "text", backends: ["watsonx"] },
  { key: "watsonx.space_id", label: () => "Space", hint: () => "in place of a project", kind: "text", backends: ["watsonx"] },
  {
    key: "watsonx.input_tokens",
    label: () => "Tokens at which inputs are cut",
    hint: () => "empty: long inputs are refused",
    kind: "number",
    backends: ["watsonx"],
    isRare: true,
  },
  {
    key: "azure.api_version",
    label: () => "Version of the API",
    hint: () => "such as 2024-10-21, for an older resource; empty: version 1",
    kind: "text",
    backends: ["azure"],
    isRare: true,
  },
  { key: "nim.hosted", label: () => "NVIDIA's own service", kind: "check", checked: true, backends: ["nim"] },
  {
    key: "task",
    label: () => "Task of the model",
    kind: "choice",
    options: [["", "both are tried"], ...TASKS],
    backends: ["openai", "cohere", "jina", "voyage", "perplexity", "azure", "nim", "watsonx"],
    isRare: true,
  },
  {
    key: "huggingface.task",
    label: () => "Task of the model",
    kind: "choice",
    options: [["", "embed"], ["rerank", "rerank"]],
    backends: ["huggingface"],
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
    checked: "dns",
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

type Settings = Record<string, unknown>;

const isSection = (value: unknown): value is Settings => typeof value === "object" && value !== null && !Array.isArray(value);

// The value of a key, which is below a section if it has a dot.
function read(settings: Settings, path: string): unknown {
  const [section = "", key] = path.split(".");
  const value = settings[section];
  return key === undefined ? value : isSection(value) ? value[key] : undefined;
}

// The settings with a value of a key, without the key if the value is undefined, without sections that become empty.
function written(settings: Settings, path: string, value: unknown): Settings {
  const [section = "", key] = path.split(".");
  const { [section]: before, ...others } = settings;
  if (key === undefined) return value === undefined ? others : { ...others, [section]: value };
  const below = written(isSection(before) ? before : {}, key, value);
  return Object.keys(below).length ? { ...others, [section]: below } : others;
}

function valueOf({ kind, checked }: FormField, text: string): unknown {
  if (kind === "lines") return text.split(/[\n,]/).map((line) => line.trim()).filter(Boolean);
  if (kind === "number") return Number(text);
  return kind === "check" ? checked : text;
}

// Raises: RequestError.
export function settingsOf({ backend, values, more }: UpstreamForm): Settings {
  return fieldsOf(backend)
    .map((field) => [field, (values[field.key] ?? "").trim()] as const)
    .filter(([, text]) => text)
    .reduce((settings, [field, text]) => written(settings, field.key, valueOf(field, text)), {
      ...parsedSettings(more),
      backend,
    } as Settings);
}

// A value that the form shows in this field; others stay among the further settings.
function isShown({ kind, checked, options }: FormField, value: unknown): boolean {
  if (kind === "lines") return Array.isArray(value) && value.every((each) => typeof each === "string");
  if (kind === "check") return value === checked;
  if (kind === "choice") return options?.some(([option]) => option && option === value) ?? false;
  return typeof value === "string" || typeof value === "number";
}

export function formOf({ name, settings }: Addition): UpstreamForm {
  const backend = String(settings.backend);
  const own = fieldsOf(backend)
    .map((field) => [field, read(settings, field.key)] as const)
    .filter(([field, value]) => isShown(field, value));
  const rest = own.reduce((left, [{ key }]) => written(left, key, undefined), settings);
  return {
    name,
    backend,
    serve: "",
    values: Object.fromEntries(own.map(([{ key }, value]) => [key, Array.isArray(value) ? value.join("\n") : String(value)])),
    more: furtherSettings(rest, ["backend"]),
  };
}
