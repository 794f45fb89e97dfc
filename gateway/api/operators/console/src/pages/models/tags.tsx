// Names as small tags, such as the operations of a model.
import { NONE, words } from "../../lib/format.ts";

export const Tags = ({ names }: { names: readonly string[] }) =>
  names.length ? (
    <span class="tags">
      {names.map((name) => (
        <span key={name} class="tag">
          {words(name)}
        </span>
      ))}
    </span>
  ) : (
    <>{NONE}</>
  );
