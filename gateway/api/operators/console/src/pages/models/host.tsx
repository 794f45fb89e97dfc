// Models of the Hub on this host: what is stored, downloads in progress, checks.
import { Download, HardDrive, ShieldCheck } from "lucide";
import { named, send } from "../../lib/api.ts";
import { bytes, words } from "../../lib/format.ts";
import { useAction } from "../../lib/load.ts";
import type { Checkpoint } from "../../lib/types.ts";
import { useAccess } from "../../shell/access.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Card } from "../../ui/card.tsx";
import { Clip } from "../../ui/clip.tsx";
import { Meter } from "../../ui/meter.tsx";
import { Failure } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { notify } from "../../ui/toast.tsx";

export function Host({ checkpoints, onPull }: { checkpoints: Checkpoint[]; onPull: () => void }) {
  const { canChange } = useAccess();
  const acting = useAction(async (name: string, verb: string) => {
    const { content } = await send(`${named("/admin/registry", name)}/${verb}`, { method: "POST" });
    notify(`${content.model_id}: ${words(content.status)}`);
  });
  return (
    <Card isFlush id="registry">
      <Failure problem={acting.problem} />
      <Table
        label="Models on this host"
        id="host"
        rows={checkpoints}
        rowKey={({ model }) => model}
        file="models-on-this-host"
        empty={{
          icon: HardDrive,
          title: "No models on this host",
          children: "Pull one of the Hub. This needs `manager` in router.yaml.",
          action: canChange ? <Button onClick={onPull}>Pull a model</Button> : undefined,
        }}
        columns={[
          {
            id: "model",
            title: "Model",
            value: ({ model }) => model,
            kind: "long",
            show: ({ model, error }) => (
              <div class="two-lines">
                <Clip text={model} />
                {error && <span class="note bad-text">{error}</span>}
              </div>
            ),
          },
          { id: "state", title: "State", value: ({ state }) => state, show: ({ state }) => <Badge value={state} /> },
          { id: "download", title: "Progress", value: shareOf, show: (checkpoint) => <Progress checkpoint={checkpoint} /> },
          { id: "disk", title: "On disk", value: ({ stored_bytes }) => stored_bytes, kind: "number", show: ({ stored_bytes }) => bytes(stored_bytes) },
          { id: "upstreams", title: "Upstreams", value: ({ upstreams }) => upstreams.join(", ") || null },
          ...(canChange
            ? [
                {
                  id: "actions",
                  title: "",
                  kind: "actions" as const,
                  show: ({ model, state }: Checkpoint) => (
                    <>
                      {state !== "downloading" && (
                        <Button isSmall kind="ghost" icon={Download} ariaLabel={`Download ${model}`} disabled={acting.busy} onClick={() => void acting.run(model, "download")}>
                          Download
                        </Button>
                      )}
                      <Button isSmall kind="ghost" icon={ShieldCheck} ariaLabel={`Check ${model}`} disabled={acting.busy} onClick={() => void acting.run(model, "load")}>
                        Check
                      </Button>
                    </>
                  ),
                },
              ]
            : []),
        ]}
      />
    </Card>
  );
}

const shareOf = ({ state, done_bytes, total_bytes }: Checkpoint) =>
  state === "downloading" && total_bytes ? (done_bytes ?? 0) / total_bytes : null;

function Progress({ checkpoint }: { checkpoint: Checkpoint }) {
  const { state, done_bytes, total_bytes, bytes_per_s, model } = checkpoint;
  if (state !== "downloading") return <>–</>;
  const share = shareOf(checkpoint);
  const done = share === null ? bytes(done_bytes ?? 0) : `${Math.round(100 * share)} % of ${bytes(total_bytes)}`;
  return (
    <div class="progress">
      <Meter share={share ?? 0} tone="info" label={`Download of ${model}`} />
      <span class="note">{`${done}, ${bytes(bytes_per_s ?? 0)}/s`}</span>
    </div>
  );
}
