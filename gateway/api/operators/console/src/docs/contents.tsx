// The contents: sections by dialect, which fold. The section of the shown operation is open; those opened before stay so,
// because a link that moves away below the pointer would leave another one marked there.
import { useEffect, useRef } from "preact/hooks";
import { addressOf } from "./address.ts";
import type { ApiDocument, Operation } from "./document.ts";
import { Method } from "./method.tsx";

export interface ContentsProps {
  api: ApiDocument;
  operations: Operation[];
  current: Operation | null;
  query: string;
  onFollow: () => void;
}

export function Contents({ api, operations, current, query, onFollow }: ContentsProps) {
  const list = useRef<HTMLElement>(null);
  useEffect(() => {
    const link = list.current?.querySelector("[aria-current]");
    const section = link?.closest("details");
    if (section) section.open = true;
    link?.scrollIntoView({ block: "nearest" });
  }, [current]);
  const opened = useRef(new Set<string>()).current;
  opened.add(current?.tag ?? operations[0]?.tag ?? "");
  return (
    <nav aria-label="Contents" class="contents" ref={list}>
      {api.tags.map(({ name, description }) => {
        const own = operations.filter(({ tag }) => tag === name);
        if (!own.length) return null;
        return (
          <details key={name} open={opened.has(name)}>
            <summary title={description}>
              {name} <span class="count">{own.length}</span>
            </summary>
            {own.map((operation) => (
              <a
                key={operation.id}
                href={addressOf({ id: operation.id, query })}
                aria-current={operation === current ? "page" : undefined}
                title={operation.raw.summary}
                onClick={onFollow}
              >
                <Method name={operation.method} />
                <span class="clip" dir="ltr">{operation.path}</span>
              </a>
            ))}
          </details>
        );
      })}
    </nav>
  );
}
