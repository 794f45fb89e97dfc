// The models that a form can use: those with its operation, the gateway's default first.
import type { ListedModel } from "../../shell/access.ts";
import { useParam } from "../../lib/route.ts";

export const operationsOf = (model: ListedModel) => (model.operations as string[] | undefined) ?? [];
const canServe = ({ state }: ListedModel) => state !== "unavailable" && state !== "refused";
// Models that can do it now.
export const able = (models: ListedModel[], operation: string) =>
  models.filter((model) => canServe(model) && operationsOf(model).includes(operation));

export interface ChosenModel {
  names: string[];
  value: string;
  onChange: (name: string) => void;
}

// The chosen model is in the address, so that a link opens the same form.
export function useModel(models: ListedModel[], operation: string): ChosenModel {
  const [chosen, onChange] = useParam("model");
  const names = able(models, operation).map(({ id }) => id);
  const preferred = models.find((model) => (model.default_for as string[] | undefined)?.includes(operation))?.id;
  const fallback = preferred && names.includes(preferred) ? preferred : names[0];
  return { names, value: names.includes(chosen) ? chosen : (fallback ?? ""), onChange };
}
