// Who and what took part in a call.
import { count, money } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import { CopyButton } from "../../ui/copy-button.tsx";
import { type KeyValue, KeyValues } from "../../ui/key-values.tsx";
import type { Call } from "./call.ts";

export interface CallFactsProps {
  call: Call;
  currency: string | null;
  // With {trace_id} in it.
  traceLink: string | null;
}

// Only addresses of the web are links.
const traceAddress = (link: string | null, id: string) => {
  const address = link?.replaceAll("{trace_id}", encodeURIComponent(id)) ?? "";
  return /^https?:\/\//.test(address) ? address : null;
};

export function CallFacts({ call, currency, traceLink }: CallFactsProps) {
  const trace = call.trace_id ? traceAddress(traceLink, call.trace_id) : null;
  const rows: (KeyValue | false)[] = [
    [
      "Request id",
      <>
        <code id="request-id">{call.request_id}</code> <CopyButton text={call.request_id} target="request-id" />
      </>,
    ],
    call.tenant !== null && ["Tenant", <a href={href("tenants", [call.tenant])}>{call.tenant}</a>],
    call.key_id !== null && ["Key", <a href={href("keys", [], { q: call.key_id })}>{call.key_id}</a>],
    call.model !== null && ["Model", <a href={href("models", [], { q: call.model })}>{call.model}</a>],
    call.operation !== null && ["Operation", call.operation],
    ["Inputs and tokens", `${count(call.inputs)} and ${count(call.tokens)}`],
    call.cost !== null && call.cost !== undefined && ["Cost", money(call.cost, currency)],
    call.end_user !== null && ["End user", call.end_user],
    call.gateway !== null && ["Gateway", call.gateway],
    call.attempts > 0 && ["Attempts", count(call.attempts)],
    Boolean(call.trace_id) && [
      "Trace",
      trace ? (
        <a href={trace} target="_blank" rel="noreferrer">
          {call.trace_id}
        </a>
      ) : (
        <code>{call.trace_id}</code>
      ),
    ],
  ];
  return (
    <>
      <KeyValues rows={rows} id="call-facts" />
      {call.replicas.length > 0 && (
        <section>
          <h3>Replicas, in the order in which they were asked</h3>
          <ol class="replicas">
            {call.replicas.map((name, at) => (
              <li key={at}>
                <code>{name}</code>
              </li>
            ))}
          </ol>
        </section>
      )}
    </>
  );
}
