// Chooses the model of a form. Long lists are typed into.
import { Select, TextField } from "../../ui/field.tsx";
import type { ChosenModel } from "./models.ts";

const SELECTED_MAX = 30;

export function ModelSelect({ model }: { model: ChosenModel }) {
  if (model.names.length > SELECTED_MAX) {
    return <TextField label="Model" value={model.value} onInput={model.onChange} options={model.names} />;
  }
  return <Select label="Model" value={model.value} onChange={model.onChange} options={model.names} />;
}
