// The frame: contents and search on the left, one operation beside them. It shows before the document has arrived.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Menu, X } from "lucide";
import { Logo } from "../shell/logo.tsx";
import { Button } from "../ui/button.tsx";
import { Empty, Problem, Skeleton } from "../ui/states.tsx";
import { addressOf, findOperation, type Place, usePlace } from "./address.ts";
import { Contents } from "./contents.tsx";
import { type ApiDocument, fetchDocument, operationsOf } from "./document.ts";
import { OperationView } from "./operation.tsx";
import { Search } from "./search-box.tsx";
import { Start } from "./start.tsx";
import { TopLinks } from "./top-links.tsx";

export interface DocsProps {
  // Of the OpenAPI document.
  address: string;
  // Of the console; empty where it is served at another address only.
  consoleAddress: string;
  // Scheme, host and prefix of the gateway.
  base: string;
}

export function Docs({ address, consoleAddress, base }: DocsProps) {
  const [api, setApi] = useState<ApiDocument | null>(null);
  const [problem, setProblem] = useState("");
  const [turn, setTurn] = useState(0);
  const [place, go] = usePlace();
  const drawer = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    setProblem("");
    fetchDocument(address).then(setApi, (error: Error) => setProblem(`The OpenAPI document could not be read: ${error.message}`));
  }, [turn]);
  const operations = useMemo(() => (api ? operationsOf(api) : []), [api]);
  const found = findOperation(operations, place.id);
  const title = found ? `${found[0].method} ${found[1]}` : "API reference";
  useEffect(() => {
    document.title = `${title} · Embedding gateway`;
  }, [title]);
  const follow = (next: Place, isStep: boolean) => {
    go(next, isStep);
    if (isStep) drawer.current?.close();
  };
  const side = (where: string) => (
    <>
      {api ? (
        <Search api={api} operations={operations} place={place} go={follow} isMain={where === "sidebar"}>
          <Contents api={api} operations={operations} current={found?.[0] ?? null} query={place.query} onFollow={() => drawer.current?.close()} />
        </Search>
      ) : (
        !problem && <Skeleton rows={12} />
      )}
      <TopLinks consoleAddress={consoleAddress} address={address} />
    </>
  );
  return (
    <>
      <a class="skip" href="#content" onClick={skip}>
        Skip to the content
      </a>
      <div class="frame docs-frame">
        <aside class="sidebar" aria-label="API reference">
          <a class="brand" href={addressOf({ id: "", query: "" })}>
            <Logo />
            <span>Embedding gateway</span>
          </a>
          {side("sidebar")}
        </aside>
        <header class="topbar">
          <Button kind="ghost" icon={Menu} label="Open the contents" onClick={() => drawer.current?.showModal()} />
          <Logo size={24} />
          <span class="clip">{title}</span>
        </header>
        <dialog
          class="drawer"
          ref={drawer}
          aria-label="Contents"
          onPointerDown={(event) => {
            if (event.target === drawer.current) drawer.current?.close();
          }}
        >
          <div class="drawer-content">
            <div class="drawer-head">
              <a class="brand" href={addressOf({ id: "", query: "" })} onClick={() => drawer.current?.close()}>
                <Logo />
                <span>API reference</span>
              </a>
              <Button kind="ghost" icon={X} label="Close the contents" onClick={() => drawer.current?.close()} />
            </div>
            {side("drawer")}
          </div>
        </dialog>
        <main id="content" tabIndex={-1}>
          {problem && (
            <Problem id="document-problem">
              {problem} <Button isSmall onClick={() => setTurn(turn + 1)}>Try again</Button>
            </Problem>
          )}
          {!api && !problem && <Skeleton rows={8} height={26} />}
          {api && found && <OperationView key={found[0].id + found[1]} api={api} operation={found[0]} path={found[1]} base={base} />}
          {api && !found && place.id && (
            <Empty title={`There is no operation ${place.id}`}>It may belong to another version of the gateway. Use the contents or the search.</Empty>
          )}
          {api && !place.id && <Start api={api} operations={operations} address={address} base={base} />}
        </main>
      </div>
    </>
  );
}

// The address has the operation: it must not become that of the content.
function skip(event: MouseEvent) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}
