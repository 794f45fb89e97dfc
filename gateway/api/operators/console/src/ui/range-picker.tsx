// Chooses the span of time of the charts on a page.
import { Undo2 } from "lucide";
import { moment } from "../lib/format.ts";
import { type Range, RANGES } from "../lib/range.ts";
import { Button } from "./button.tsx";

export function RangePicker({ range, names = RANGES }: { range: Range; names?: readonly string[] }) {
  return (
    <div class="range" role="group" aria-label="Time range">
      {range.name === "" && (
        <>
          <span class="note">{`${moment(range.fromS)} – ${moment(range.untilS)}`}</span>
          <Button isSmall kind="ghost" icon={Undo2} onClick={() => range.choose("24h")}>
            Leave the zoom
          </Button>
        </>
      )}
      <div class="segments">
        {names.map((name) => (
          <button key={name} type="button" aria-pressed={name === range.name} onClick={() => range.choose(name)}>
            {name}
          </button>
        ))}
      </div>
    </div>
  );
}
