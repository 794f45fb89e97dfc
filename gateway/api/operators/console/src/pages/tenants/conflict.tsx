// Another operator was faster: what they changed, and how to go on.
import { useEffect, useRef } from "preact/hooks";
import type { ChangedField } from "../../lib/settings.ts";
import { Button } from "../../ui/button.tsx";
import { Diff } from "../audit/diff.tsx";

export interface ConflictProps {
  name: string;
  changes: ChangedField[];
  onLoad: (isMineKept: boolean) => void;
}

export function Conflict({ name, changes, onLoad }: ConflictProps) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    box.current?.focus();
    box.current?.scrollIntoView({ block: "nearest" });
  }, []);
  return (
    <div class="conflict" role="alert" tabIndex={-1} ref={box}>
      <p>
        <b>
          <bdi>{name}</bdi> was changed meanwhile.
        </b>{" "}
        Nothing of yours is saved yet.
      </p>
      <Diff changes={changes} />
      <div class="row">
        <Button isSmall kind="primary" onClick={() => onLoad(true)}>
          Load it and keep my changes
        </Button>
        <Button isSmall onClick={() => onLoad(false)}>
          Load it
        </Button>
      </div>
    </div>
  );
}
