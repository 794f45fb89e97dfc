// Columns of the table of keys.
import { moment, NONE, utcDay } from "../../lib/format.ts";
import { limitsWords } from "../../lib/limits.ts";
import { href } from "../../lib/route.ts";
import type { Key } from "../../lib/tenants.ts";
import { Badge } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";
import { Clip } from "../../ui/clip.tsx";
import type { Column } from "../../ui/table.tsx";
import { Expiry } from "./expiry.tsx";

export interface KeyColumnsOptions {
  hasTenant: boolean;
  canChange: boolean;
  currency: string | null;
  onRotate: (key: Key) => void;
  onRevoke: (key: Key) => void;
}

const SOURCES = { store: "stored", file: "router.yaml", operators: "admin.keys" };

const scopesWords = (key: Key) => key.scopes?.join(", ") ?? "all operations";
const modelsWords = (key: Key) => (key.models === null ? "all models" : key.models.join(", ") || "no model");

function Id({ of }: { of: Key }) {
  return (
    <span class="tenant-name">
      <Clip text={of.id} class="mono" />
      {of.source !== "store" && <Badge value={SOURCES[of.source]} tone="quiet" />}
      {of.successor && <Badge value="replaced" tone="warn" label="replaced" />}
    </span>
  );
}

function Tenant({ of }: { of: Key }) {
  if (of.source === "operators") return <span class="note">operators</span>;
  return (
    <span class="tenant-name">
      <a href={href("tenants", [of.tenant])}>
        <Clip text={of.tenant} />
      </a>
      {!of.has_tenant && <Badge value="not defined" tone="bad" />}
    </span>
  );
}

const CHIPS = 2;

// Scopes as chips. What else narrows the key is below them, and all of it is in the title.
function May({ of, currency }: { of: Key; currency: string | null }) {
  const limits = limitsWords(of.limits, currency);
  const narrowed = [of.models && modelsWords(of), limits].filter(Boolean).join("; ");
  const more = (of.scopes?.length ?? 0) - CHIPS;
  return (
    <div class="key-may" title={[scopesWords(of), modelsWords(of), limits || "the limits of its tenant"].join("\n")}>
      {of.scopes ? (
        <span class="key-scopes">
          {of.scopes.slice(0, CHIPS).map((scope) => (
            <Badge key={scope} value={scope} tone="quiet" label={scope} />
          ))}
          {more > 0 && <span class="note">+{more}</span>}
        </span>
      ) : (
        <span class="nowrap">all operations</span>
      )}
      {narrowed && <Clip class="note" text={narrowed} />}
    </div>
  );
}

export function keyColumns({ hasTenant, canChange, currency, onRotate, onRevoke }: KeyColumnsOptions): Column<Key>[] {
  const tenant: Column<Key> = { id: "tenant", title: "Tenant", kind: "long", value: (key) => key.tenant, show: (key) => <Tenant of={key} /> };
  const actions: Column<Key> = {
    id: "actions",
    title: "",
    kind: "actions",
    show: (key) =>
      key.source === "store" && (
        <>
          {!key.successor && (
            <Button isSmall kind="ghost" ariaLabel={`Rotate ${key.id}`} onClick={() => onRotate(key)}>
              Rotate
            </Button>
          )}
          <Button isSmall kind="ghost" ariaLabel={`Revoke ${key.id}`} onClick={() => onRevoke(key)}>
            Revoke
          </Button>
        </>
      ),
  };
  return [
    { id: "id", title: "Key", value: (key) => key.id, show: (key) => <Id of={key} /> },
    ...(hasTenant ? [tenant] : []),
    {
      id: "scopes",
      title: "May",
      isSorted: false,
      value: scopesWords,
      show: (key) => <May of={key} currency={currency} />,
    },
    { id: "models", title: "Models", kind: "hidden", value: modelsWords },
    { id: "limits", title: "Limits", kind: "hidden", value: (key) => limitsWords(key.limits, currency) },
    {
      id: "created",
      title: "Created",
      value: (key) => (key.created === null ? null : new Date(key.created * 1000).toISOString()),
      show: (key) => (
        <div class="key-created">
          <span class="nowrap" title={moment(key.created)}>
            {moment(key.created, "day")}
          </span>
          {key.created_by && <Clip class="note" text={`by ${key.created_by}`} />}
        </div>
      ),
    },
    { id: "created_by", title: "Created by", kind: "hidden", value: (key) => key.created_by },
    {
      id: "last_used",
      title: "Last used",
      value: (key) => key.last_used,
      show: (key) => (key.last_used === utcDay(new Date()) ? "today" : (key.last_used ?? (key.source === "store" ? "never" : NONE))),
    },
    {
      id: "expires",
      title: "Expires",
      value: (key) => (key.expires === null ? null : new Date(key.expires * 1000).toISOString()),
      show: (key) => <Expiry expires={key.expires} />,
    },
    { id: "source", title: "Source", kind: "hidden", value: (key) => SOURCES[key.source] },
    ...(canChange ? [actions] : []),
  ];
}
