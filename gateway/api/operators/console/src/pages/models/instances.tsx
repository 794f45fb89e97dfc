// Model servers that operators started on this host.
import { useState } from "preact/hooks";
import { Server } from "lucide";
import { named, send } from "../../lib/api.ts";
import { NONE, words } from "../../lib/format.ts";
import { href } from "../../lib/route.ts";
import { useAction } from "../../lib/load.ts";
import type { Instance } from "../../lib/types.ts";
import { useAccess } from "../../shell/access.ts";
import { Badge } from "../../ui/badge.tsx";
import { Card } from "../../ui/card.tsx";
import { Confirm } from "../../ui/confirm.tsx";
import { Failure } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { notify } from "../../ui/toast.tsx";
import { InstanceActions, type Verb } from "./instance-actions.tsx";
import { InstanceLog } from "./instance-log.tsx";

const TITLES: Record<Verb, string> = { start: "Start", stop: "Stop", restart: "Restart", remove: "Remove", logs: "Logs of" };

async function act(verb: Verb, name: string) {
  const path = named("/admin/instances", name);
  const { content } = verb === "remove" ? await send(path, { method: "DELETE" }) : await send(`${path}/${verb}`, { method: "POST" });
  notify(`${name}: ${content ? words(content.status) : "removed"}`);
}

export function Instances({ instances }: { instances: Instance[] }) {
  const { canChange } = useAccess();
  const [open, setOpen] = useState<{ verb: Verb; name: string } | null>(null);
  const starting = useAction(act);
  const close = () => setOpen(null);
  return (
    <Card isFlush id="instances">
      <Failure problem={starting.problem} />
      <Table
        label="Instances"
        id="instance"
        rows={instances}
        rowKey={({ name }) => name}
        file="instances"
        empty={{
          icon: Server,
          title: "No instances",
          children: "Model servers that are started through the API for instances are listed here. This needs `manager` in router.yaml.",
        }}
        columns={[
          { id: "name", title: "Instance", value: ({ name }) => name },
          {
            id: "state",
            title: "State",
            value: ({ status }) => status,
            show: ({ status, reason }) => (
              <div class="two-lines">
                <Badge value={status} />
                {reason && <span class="note">{reason}</span>}
              </div>
            ),
          },
          { id: "kind", title: "Kind", value: ({ kind }) => kind },
          { id: "loads", title: "Loads", value: ({ model_id }) => model_id, kind: "long" },
          {
            id: "upstream",
            title: "Upstream",
            value: ({ upstream }) => upstream,
            show: ({ upstream }) => (
              <a class="clip" href={href("upstreams", [upstream])} title={upstream}>
                {upstream}
              </a>
            ),
          },
          { id: "pid", title: "Process", value: ({ pid }) => pid, kind: "number", show: ({ pid }) => pid ?? NONE },
          { id: "restarts", title: "Restarts", value: ({ restarts }) => restarts, kind: "number" },
          { id: "device", title: "Device", value: ({ device }) => device },
          {
            id: "actions",
            title: "",
            kind: "actions",
            show: (instance) => (
              <InstanceActions
                instance={instance}
                canChange={canChange}
                busy={starting.busy}
                onAct={(verb) => (verb === "start" ? void starting.run(verb, instance.name) : setOpen({ verb, name: instance.name }))}
              />
            ),
          },
        ]}
      />
      {open?.verb === "logs" && <InstanceLog name={open.name} onClose={close} />}
      {open && open.verb !== "logs" && (
        <Confirm
          title={`${TITLES[open.verb]} ${open.name}?`}
          verb={TITLES[open.verb]}
          isDanger={open.verb === "remove"}
          onClose={close}
          action={() => act(open.verb, open.name)}
        >
          <p>Calls in flight finish.</p>
        </Confirm>
      )}
    </Card>
  );
}
