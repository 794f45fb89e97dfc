// The page of one tenant: limits, usage, keys, what failed, and what operators have changed.
import { useState } from "preact/hooks";
import { ChartColumn, Pencil, Trash2 } from "lucide";
import { get, named } from "../../lib/api.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import type { Summary } from "../../lib/tenants.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Card, Grid } from "../../ui/card.tsx";
import { Page } from "../../ui/page.tsx";
import { Empty, Failure, Skeleton } from "../../ui/states.tsx";
import { KeyCard } from "../keys/key-card.tsx";
import { DeleteTenant } from "./delete-tenant.tsx";
import { EditTenant } from "./edit-tenant.tsx";
import { FailedCalls } from "./failed-calls.tsx";
import { LimitsCard } from "./limits-card.tsx";
import { ModelUsage } from "./model-usage.tsx";
import { Notes } from "./saved-notes.tsx";
import { SettingsCard } from "./settings-card.tsx";
import { TenantCharts } from "./tenant-charts.tsx";
import { TenantChanges } from "./tenant-changes.tsx";
import { TenantStats } from "./tenant-stats.tsx";
import { UsageReport } from "./usage-report.tsx";

const REFRESH_MS = 5000;
const PATH: [string, string][] = [["Tenants", "#/tenants"]];

function sourceNote(tenant: Summary, canChange: boolean) {
  if (tenant.in_file && tenant.etag) return "A tenant of router.yaml. Settings of its name are stored too and never apply: delete them here.";
  if (tenant.in_file) return "A tenant of router.yaml: change it under tenants there, then read the file again.";
  if (!tenant.etag) return "It is not stored: it has no settings of its own.";
  return canChange ? "Stored; every gateway applies a change within a second." : "Stored. Your key may read, not change.";
}

type Opened = "edit" | "delete" | "usage" | null;

export function TenantPage({ name }: { name: string }) {
  const { canChange } = useAccess();
  const [opened, setOpened] = useState<Opened>(null);
  const { content: tenant, problem, reload } = useLoad(() => get<Summary>(named("/admin/tenants", name, "/summary")), REFRESH_MS);
  // Counts each change here, after which the records are read again.
  const [turn, setTurn] = useState(0);
  const changed = () => {
    reload();
    setTurn((before) => before + 1);
  };
  const isStored = canChange && tenant !== null && tenant.etag !== null;
  const isEditable = isStored && !tenant.in_file;
  if (problem?.status === 404) {
    return (
      <Page title={name} path={PATH}>
        <Card>
          <Empty title="There is no such tenant" action={<Button href={href("tenants", [], { q: name })}>Search the tenants</Button>}>
            {problem.message}
          </Empty>
        </Card>
      </Page>
    );
  }
  const actions = (
    <>
      <Button icon={ChartColumn} onClick={() => setOpened("usage")}>
        Usage report
      </Button>
      {isStored && (
        <Button icon={Trash2} onClick={() => setOpened("delete")}>
          {isEditable ? "Delete" : "Delete what is stored"}
        </Button>
      )}
      {isEditable && (
        <Button kind="primary" icon={Pencil} onClick={() => setOpened("edit")}>
          Edit
        </Button>
      )}
    </>
  );
  return (
    <Page title={name} path={PATH} note={tenant && sourceNote(tenant, canChange)} actions={actions}>
      <Failure problem={problem} id="tenant-problem" />
      {tenant ? (
        <>
          <Notes notes={tenant.notes} />
          <TenantStats tenant={tenant} />
          <Grid>
            <div class="span-7">
              <LimitsCard tenant={tenant} onEdit={isEditable ? () => setOpened("edit") : undefined} />
              <ModelUsage tenant={tenant} />
            </div>
            <SettingsCard tenant={tenant} />
            <KeyCard tenant={name} onChanged={changed} />
          </Grid>
          <TenantCharts tenant={tenant} />
          <Grid>
            <FailedCalls name={name} />
            <TenantChanges tenant={tenant} turn={turn} canRestore={isEditable} onRestored={changed} />
          </Grid>
        </>
      ) : (
        !problem && <Skeleton rows={6} height={40} />
      )}
      {tenant?.etag && opened === "edit" && (
        <EditTenant name={name} etag={tenant.etag} settings={tenant.settings} onClose={() => setOpened(null)} onSaved={changed} />
      )}
      {tenant && opened === "delete" && <DeleteTenant tenant={tenant} onClose={() => setOpened(null)} />}
      {opened === "usage" && <UsageReport tenant={name} onClose={() => setOpened(null)} />}
    </Page>
  );
}
