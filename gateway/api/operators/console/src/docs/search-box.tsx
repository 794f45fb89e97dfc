// Search: a field with a list of results below it, which takes the place of the contents. `/` focuses it, the arrows
// choose a result, Enter follows it, Escape ends the search.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { Search as SearchGlyph } from "lucide";
import { Icon } from "../ui/icon.tsx";
import { addressOf, type Place } from "./address.ts";
import type { ApiDocument, Operation } from "./document.ts";
import { Method } from "./method.tsx";
import { indexOf, type Result, search } from "./search.ts";
import { Inline } from "./text.tsx";

export interface SearchProps {
  api: ApiDocument;
  operations: Operation[];
  place: Place;
  go: (place: Place, isStep: boolean) => void;
  // Of several search fields, the one that `/` focuses.
  isMain: boolean;
  // Shown while nothing is searched.
  children: ComponentChildren;
}

const idOf = ({ operation, path }: Result) => operation.method + path;

const isTyping = (target: EventTarget | null) =>
  target instanceof HTMLElement && (target.isContentEditable || /^(input|textarea|select)$/i.test(target.tagName));

export function Search({ api, operations, place, go, isMain, children }: SearchProps) {
  const id = useId();
  const field = useRef<HTMLInputElement>(null);
  const list = useRef<HTMLDivElement>(null);
  const [choice, setChoice] = useState({ query: "", at: 0 });
  // Another query begins with its first result.
  const active = choice.query === place.query ? choice.at : 0;
  const index = useMemo(() => indexOf(api, operations), [operations]);
  const results = useMemo(() => search(index, place.query), [index, place.query]);
  const isOpen = place.query.trim() !== "";
  useEffect(() => {
    list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }, [active]);
  useEffect(() => {
    if (!isMain) return undefined;
    const focus = (event: KeyboardEvent) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      event.preventDefault();
      field.current?.focus();
      field.current?.select();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, [isMain]);
  const onKeyDown = (event: KeyboardEvent) => {
    const last = results.length - 1;
    const next = { ArrowDown: Math.min(active + 1, last), ArrowUp: Math.max(active - 1, 0) }[event.key];
    if (next !== undefined && isOpen) setChoice({ query: place.query, at: next });
    else if (event.key === "Enter" && results[active]) go({ id: idOf(results[active]), query: place.query }, true);
    else if (event.key === "Escape" && place.query) go({ id: place.id, query: "" }, false);
    else return;
    event.preventDefault();
  };
  return (
    <>
      <div class="search">
        <Icon of={SearchGlyph} size={15} />
        <input
          ref={field}
          type="text"
          role="combobox"
          aria-label="Search the API"
          aria-expanded={isOpen}
          aria-controls={`${id}-list`}
          aria-autocomplete="list"
          aria-activedescendant={isOpen && results.length ? `${id}-${active}` : undefined}
          placeholder="Search paths and fields"
          autocomplete="off"
          spellcheck={false}
          dir="auto"
          value={place.query}
          onInput={(event) => go({ id: place.id, query: event.currentTarget.value }, false)}
          onKeyDown={onKeyDown}
        />
        <kbd aria-hidden="true">/</kbd>
      </div>
      <p class="unseen" role="status">
        {isOpen && (results.length ? `${results.length} results` : "No results")}
      </p>
      <div id={`${id}-list`} role="listbox" aria-label="Results" class="results" hidden={!isOpen || !results.length} ref={list}>
        {results.map((result, at) => (
          <a
            key={result.operation.id}
            id={`${id}-${at}`}
            role="option"
            aria-selected={at === active}
            tabIndex={-1}
            href={addressOf({ id: idOf(result), query: place.query })}
            onClick={(event) => {
              if (event.ctrlKey || event.metaKey || event.shiftKey) return;
              event.preventDefault();
              go({ id: idOf(result), query: place.query }, true);
            }}
          >
            <span class="result-head">
              <Method name={result.operation.method} />
              <span class="result-path" dir="ltr">{result.path}</span>
            </span>
            <span class="note">
              <Inline text={result.operation.raw.summary} />
            </span>
            {result.field && (
              <span class="note result-field">
                <code>{result.field}</code> <Inline text={result.meaning} />
              </span>
            )}
          </a>
        ))}
      </div>
      {isOpen && !results.length && <p class="note no-results">Nothing found. Every word has to occur in a path, a summary, a description or a field.</p>}
      {!isOpen && children}
    </>
  );
}
