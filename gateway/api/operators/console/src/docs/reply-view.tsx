// The reply to a request of the form: status, time, headers, and the body as text.
import { Badge, toneOfStatus } from "../ui/badge.tsx";
import { CopyButton } from "../ui/copy-button.tsx";
import type { ShownReply } from "./reply.ts";

export function ReplyView({ reply }: { reply: ShownReply }) {
  return (
    <div class="reply">
      <div class="reply-head">
        <Badge value={String(reply.status)} tone={toneOfStatus(reply.status)} label={`${reply.status} ${reply.statusText}`} />
        <span class="note">{Math.round(reply.elapsedMs)} ms</span>
        <CopyButton text={reply.text} target="reply-text" />
      </div>
      <details>
        <summary>{reply.headers.length} headers</summary>
        <pre tabIndex={0} aria-label="Headers of the reply" id="reply-headers">
          {reply.headers.map(([name, value]) => `${name}: ${value}`).join("\n")}
        </pre>
      </details>
      <pre tabIndex={0} aria-label="Body of the reply" id="reply-text" dir="auto">
        {reply.text || "The body is empty."}
      </pre>
    </div>
  );
}
