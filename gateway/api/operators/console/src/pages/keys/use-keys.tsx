// The table of keys, of all tenants or of one, the button that makes one, and the dialogs of what can be done.
import { useState } from "preact/hooks";
import { KeyRound, Plus } from "lucide";
import { useRemoteTable } from "../../lib/remote-table.ts";
import { useStatus } from "../../lib/status.ts";
import type { CreatedKey as Created, Key } from "../../lib/tenants.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Failure } from "../../ui/states.tsx";
import { Table } from "../../ui/table.tsx";
import { CreatedKey } from "./created-key.tsx";
import { keyColumns } from "./key-columns.tsx";
import { NewKey } from "./new-key.tsx";
import { RevokeKey } from "./revoke-key.tsx";
import { RotateKey } from "./rotate-key.tsx";

type Opened = { what: "new" } | { what: "rotate" | "revoke"; key: Key } | { what: "created"; created: Created } | null;

const ALL = { title: "No keys yet", children: "A caller sends a key with each request; it belongs to a tenant.", icon: KeyRound };
const OF_TENANT = { title: "No keys yet", children: "Calls of this tenant need a key.", icon: KeyRound };

// tenant: only its keys.
export function useKeys(tenant?: string, onChanged?: () => void) {
  const { canChange } = useAccess();
  const currency = useStatus().snapshot?.currency ?? null;
  const [opened, setOpened] = useState<Opened>(null);
  const isOne = tenant !== undefined;
  const id = isOne ? "keys" : "";
  const { rows, remote, problem, reload } = useRemoteTable<Key>("/admin/keys", { id, sort: isOne ? "id" : "-created", query: { tenant } });
  const close = () => setOpened(null);
  const changed = () => {
    reload();
    onChanged?.();
  };
  const show = (created: Created) => {
    setOpened({ what: "created", created });
    changed();
  };
  const columns = keyColumns({
    hasTenant: !isOne,
    canChange,
    currency,
    onRotate: (key) => setOpened({ what: "rotate", key }),
    onRevoke: (key) => setOpened({ what: "revoke", key }),
  });
  return {
    add: canChange && (
      <Button kind={isOne ? "plain" : "primary"} isSmall={isOne} icon={Plus} onClick={() => setOpened({ what: "new" })}>
        New key
      </Button>
    ),
    table: (
      <>
        <Failure problem={problem} id="keys-problem" />
        {(rows || !problem) && (
          <Table
            id={id}
            label="Keys"
            columns={columns}
            rows={rows}
            remote={remote}
            rowKey={(key) => `${key.source} ${key.id}`}
            file={isOne ? `keys-${tenant}` : "keys"}
            empty={isOne ? OF_TENANT : ALL}
          />
        )}
      </>
    ),
    dialogs: (
      <>
        {opened?.what === "new" && <NewKey tenant={tenant} onClose={close} onCreated={show} />}
        {opened?.what === "created" && <CreatedKey created={opened.created} onClose={close} />}
        {opened?.what === "rotate" && <RotateKey of={opened.key} onClose={close} onRotated={show} />}
        {opened?.what === "revoke" && <RevokeKey of={opened.key} onClose={close} onRevoked={changed} />}
      </>
    ),
  };
}
