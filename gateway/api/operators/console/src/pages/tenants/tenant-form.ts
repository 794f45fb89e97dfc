// The form of a tenant: its settings as text, its checks, and the words of the gateway beside their field.
import type { RequestError } from "../../lib/api.ts";
import { type LimitRow, limitsOf, nameOf, rowProblem, rowsOf } from "../../lib/limits.ts";
import type { Settings } from "../../lib/tenants.ts";
import { modelsProblem, withTyped } from "../../ui/model-choice.tsx";

export interface ModelLimits {
  model: string;
  rows: LimitRow[];
}

export interface TenantForm {
  name: string;
  limits: LimitRow[];
  modelLimits: ModelLimits[];
  userLimits: LimitRow[];
  models: string[] | null;
  // A model that is written and not yet added.
  typedModel: string;
  weight: string;
  priority: string;
  queueTokens: string;
  join: boolean;
  certificates: string;
}

export type Errors = Record<string, string>;

export const formOf = (name: string, settings: Settings): TenantForm => ({
  name,
  limits: rowsOf(settings.limits),
  modelLimits: Object.entries(settings.model_limits).map(([model, limits]) => ({ model, rows: rowsOf(limits) })),
  userLimits: rowsOf(settings.end_user_limits),
  models: settings.models,
  typedModel: "",
  weight: String(settings.weight),
  priority: settings.priority,
  queueTokens: settings.queue_tokens === null ? "" : String(settings.queue_tokens),
  join: settings.join,
  certificates: settings.certificates.join("\n"),
});

export const linesOf = (text: string) =>
  text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

const numberOf = (text: string) => Number(text.replaceAll(/[_,\s]/g, ""));

export const settingsOf = (form: TenantForm): Settings => ({
  models: withTyped(form.models, form.typedModel),
  limits: limitsOf(form.limits),
  model_limits: Object.fromEntries(
    form.modelLimits.filter(({ rows }) => rows.length).map(({ model, rows }) => [model.trim(), limitsOf(rows)]),
  ),
  end_user_limits: limitsOf(form.userLimits),
  weight: numberOf(form.weight),
  priority: form.priority === "bulk" ? "bulk" : "interactive",
  queue_tokens: form.queueTokens.trim() ? numberOf(form.queueTokens) : null,
  join: form.join,
  certificates: linesOf(form.certificates),
});

const isPositive = (text: string) => Number.isSafeInteger(numberOf(text)) && numberOf(text) > 0;

// Problems that this page sees itself, by field. Those of limits are beside their rows.
// saved: the form as it was opened, for a tenant that may use no model stays so. served: names of models.
export function problemsOf(form: TenantForm, saved: TenantForm, served: string[]): Errors {
  const errors: Errors = {};
  if (!form.name.trim()) errors.name = "Write a name.";
  if (!isPositive(form.weight)) errors.weight = "a whole number from 1";
  if (form.queueTokens.trim() && !isPositive(form.queueTokens)) errors.queue_tokens = "a whole number from 1, or nothing";
  const models = modelsProblem(form.models, form.typedModel, served);
  const isSame = form.models?.length === 0 && saved.models?.length === 0 && !form.typedModel.trim();
  if (models && !isSame) errors.models = models;
  const rows = [form.limits, form.userLimits, ...form.modelLimits.map((of) => of.rows)];
  if (rows.some((of) => of.some((row) => rowProblem(row, of)))) errors.limits = "see the marked limits";
  const names = form.modelLimits.map(({ model }) => model.trim());
  if (names.some((name, at) => !name || names.indexOf(name) !== at)) errors.model_limits = "each group needs a model of its own";
  return errors;
}

// Where the words of the gateway belong: a field, the name of a limit, or "" for the whole form.
export function errorsOf(problem: RequestError | null, form: TenantForm): Errors {
  if (!problem) return {};
  const { message, param, status } = problem;
  if (status === 412 || message.startsWith("a name ")) return { name: message };
  if (linesOf(form.certificates).some((line) => message.includes(line))) return { certificates: message };
  const rows = [...form.limits, ...form.userLimits, ...form.modelLimits.flatMap((of) => of.rows)];
  const fields = ["name", "weight", "queue_tokens", "models", "certificates", "priority", "join"];
  if (param && (fields.includes(param) || rows.some((row) => nameOf(row) === param))) return { [param]: message };
  return { "": message };
}
