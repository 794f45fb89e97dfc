// One call of the tenant: what to do about its error, where its time went, and the id to name to an operator.
import { count, milliseconds, moment, money, words } from "../../lib/format.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { KeyValues } from "../../ui/key-values.tsx";
import { Said } from "../../ui/said.tsx";
import { StageBar } from "../../ui/stage-bar.tsx";
import { errorKind } from "../../lib/error-kinds.ts";
import type { OwnCall } from "./own.ts";

export function OwnCallPanel({ call, onClose }: { call: OwnCall; onClose: () => void }) {
  const isFailed = call.outcome !== "ok";
  const title = isFailed ? words(call.outcome).replace(/^./, (first) => first.toUpperCase()) : "Served";
  return (
    <Dialog title={title} note={`${moment(call.at_s, "second")} · ${milliseconds(call.duration_s)}`} isPanel onClose={onClose} id="own-call">
      <div>
        <Badge value={call.outcome} tone={toneOfStatus(call.status)} label={`${call.status} ${words(call.outcome)}`} />
      </div>
      {isFailed && (
        <div class={`finding tone-${toneOfStatus(call.status)}`}>
          <p>
            <b>{errorKind(call.outcome).means}</b>
          </p>
          {call.message && <Said message={call.message} />}
          <p>{call.advice}</p>
          <p>
            <a href="/docs">All kinds of errors</a>
          </p>
        </div>
      )}
      {Boolean(call.truncated_inputs) && (
        <div class="finding tone-warn">{`${count(call.truncated_inputs)} of the inputs were longer than the model reads, and cut.`}</div>
      )}
      <section>
        <h3>{`Time: ${milliseconds(call.duration_s)}`}</h3>
        <StageBar stages={call.stages} durationS={call.duration_s} hasLegend />
      </section>
      <KeyValues
        rows={[
          [
            "Request id",
            <>
              <code id="own-request">{call.request_id}</code> <CopyButton text={call.request_id} target="own-request" />
            </>,
          ],
          ["Model", call.model ?? "–"],
          ["Operation", call.operation ?? "–"],
          ["Key", call.key_id ?? "–"],
          ["Inputs and tokens", `${count(call.inputs)} and ${count(call.tokens)}`],
          call.cost !== null && ["Cost", money(call.cost)],
          call.trace_id !== null && ["Trace", <code>{call.trace_id}</code>],
        ]}
      />
    </Dialog>
  );
}
