// Models: those served, those of this host and its instances, or the one in the address.
import { Box, Download, HardDrive, Plus, Server } from "lucide";
import { useState } from "preact/hooks";
import { type Addition, useAdditions } from "../../lib/additions.ts";
import { useParam, useRoute } from "../../lib/route.ts";
import { useStatus } from "../../lib/status.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";
import { Tabs } from "../../ui/tabs.tsx";
import { Host } from "./host.tsx";
import { Instances } from "./instances.tsx";
import { ModelPage } from "./model-page.tsx";
import { NamePanel } from "./name-panel.tsx";
import { PullPanel } from "./pull-panel.tsx";
import { Served } from "./served.tsx";

const TABS = [
  { name: "served", title: "Served", icon: Box },
  { name: "host", title: "On this host", icon: HardDrive },
  { name: "instances", title: "Instances", icon: Server },
];

export function Models() {
  const [name] = useRoute().rest;
  return name === undefined ? <AllModels /> : <ModelPage name={name} />;
}

function AllModels() {
  const { snapshot } = useStatus();
  const { canChange } = useAccess();
  const additions = useAdditions("models");
  const [tab, setTab] = useParam("tab", "served");
  const [open, setOpen] = useState<"name" | "pull" | Addition | null>(null);
  const close = () => setOpen(null);
  const isHost = tab === "host" || tab === "instances";
  return (
    <Page
      title="Models"
      note={canChange ? "Names that callers use, and the upstreams behind them." : "You can see everything here, and change nothing."}
      actions={
        canChange && (
          <>
            {tab === "host" && (
              <Button kind="primary" icon={Download} onClick={() => setOpen("pull")}>
                Pull a model
              </Button>
            )}
            {!isHost && additions.isOffered && (
              <Button kind="primary" icon={Plus} onClick={() => setOpen("name")}>
                New name
              </Button>
            )}
          </>
        )
      }
    >
      <div class="page-tabs">
        <Tabs label="Models" tabs={TABS} chosen={isHost ? tab : "served"} onChoose={setTab} />
      </div>
      {!snapshot ? (
        <Skeleton rows={6} height={40} />
      ) : tab === "host" ? (
        <Host checkpoints={snapshot.registry} onPull={() => setOpen("pull")} />
      ) : tab === "instances" ? (
        <Instances instances={snapshot.instances} />
      ) : (
        <Served snapshot={snapshot} additions={additions} onChange={setOpen} onAdd={() => setOpen("name")} />
      )}
      {open === "pull" && <PullPanel onClose={close} />}
      {open && open !== "pull" && (
        <NamePanel
          addition={open === "name" ? undefined : open}
          onClose={close}
          onSaved={() => {
            additions.reload();
            close();
          }}
        />
      )}
    </Page>
  );
}
