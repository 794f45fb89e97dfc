// The name of a model, with what is unusual about it below.
import { href } from "../../lib/route.ts";
import { Clip } from "../../ui/clip.tsx";
import { type ModelRow, notesOf } from "./rows.ts";

export function NameCell({ row }: { row: ModelRow }) {
  const { name, model, addition } = row;
  const notes = [...(addition ? ["added here"] : []), ...(addition?.problem ? [addition.problem] : []), ...(model ? notesOf(model) : [])];
  return (
    <div class="two-lines name-cell">
      <a class="clip" href={href("models", [name])} title={name} dir="auto">
        {name}
      </a>
      {notes.length > 0 && <Clip class="note" text={notes.join("; ")} />}
    </div>
  );
}
