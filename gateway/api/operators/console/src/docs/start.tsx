// The start: how to send a key, and the dialects with their first operations.
import { ArrowRight } from "lucide";
import { Icon } from "../ui/icon.tsx";
import { addressOf } from "./address.ts";
import type { ApiDocument, Operation } from "./document.ts";
import { Method } from "./method.tsx";
import { Inline } from "./text.tsx";

const SHOWN = 3;

interface StartProps {
  api: ApiDocument;
  operations: Operation[];
  address: string;
  base: string;
}

export function Start({ api, operations, address, base }: StartProps) {
  const headers = Object.values(api.components.securitySchemes).filter(({ name }) => name && name !== "authorization");
  return (
    <>
      <header class="page-head">
        <div class="page-title">
          <h1>API reference</h1>
          <p class="note">
            {api.info.title} {api.info.version}, {operations.length} operations at <code>{base}</code>
          </p>
        </div>
      </header>
      <section class="card">
        <h2>Send a key</h2>
        <p class="prose">
          Every request that computes carries a key, as <code>Authorization: Bearer</code>
          {headers.map(({ name }) => (
            <>
              , or <code>{name}</code>
            </>
          ))}
          . The samples read it from <code>GATEWAY_API_KEY</code>. The whole API is in the <a href={address}>OpenAPI document</a>, which most tools read.
        </p>
      </section>
      <div class="dialects">
        {api.tags.map(({ name, description }) => {
          const inOrder = operations.filter(({ tag }) => tag === name);
          // What computes is sought more often than what describes.
          const own = [...inOrder].sort((one, other) => Number(other.method === "POST") - Number(one.method === "POST"));
          if (!own.length) return null;
          return (
            <section class="card" key={name}>
              <h2>{name}</h2>
              <p class="note">
                <Inline text={description} />
              </p>
              <ul class="plain-list">
                {own.slice(0, SHOWN).map((operation) => (
                  <li key={operation.id}>
                    <a href={addressOf({ id: operation.id, query: "" })}>
                      <Method name={operation.method} /> <span class="mono" dir="ltr">{operation.path}</span>
                    </a>
                  </li>
                ))}
                {own.length > SHOWN && (
                  <li>
                    <a href={addressOf({ id: own[SHOWN]?.id ?? "", query: "" })}>
                      {own.length - SHOWN} more <Icon of={ArrowRight} size={13} />
                    </a>
                  </li>
                )}
              </ul>
            </section>
          );
        })}
      </div>
    </>
  );
}
