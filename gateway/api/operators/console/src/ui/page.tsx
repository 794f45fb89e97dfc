// The frame of a page: title, one sentence or state, what can be done, and the content.
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ChevronRight } from "lucide";
import { Icon } from "./icon.tsx";

export interface PageProps {
  title: string;
  note?: ComponentChildren;
  actions?: ComponentChildren;
  // Pages above this one: title and address.
  path?: [string, string][];
  children: ComponentChildren;
}

let isFirst = true;

export function Page({ title, note, actions, path = [], children }: PageProps) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    document.title = `${title} · Embedding gateway`;
  }, [title]);
  useEffect(() => {
    // People who use a screen reader hear that the page has changed.
    if (!isFirst) heading.current?.focus({ preventScroll: true });
    isFirst = false;
    scrollTo(0, 0);
  }, []);
  return (
    <>
      <header class="page-head">
        <div class="page-title">
          {path.length > 0 && (
            <nav aria-label="Path" class="path">
              {path.map(([name, address]) => (
                <>
                  <a href={address}>{name}</a>
                  <Icon of={ChevronRight} size={14} />
                </>
              ))}
            </nav>
          )}
          <h1 tabIndex={-1} ref={heading} dir="auto" title={title.length > 40 ? title : undefined}>
            {title}
          </h1>
          {note && <div class="note">{note}</div>}
        </div>
        {actions && <div class="actions">{actions}</div>}
      </header>
      {children}
    </>
  );
}
