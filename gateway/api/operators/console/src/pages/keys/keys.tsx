// Keys: those of all tenants.
import { Card } from "../../ui/card.tsx";
import { Page } from "../../ui/page.tsx";
import { useKeys } from "./use-keys.tsx";

export function Keys() {
  const { add, table, dialogs } = useKeys();
  return (
    <Page title="Keys" note="Secrets that identify tenants. The gateway keeps digests only, and shows a key once." actions={add}>
      <Card id="keys" isFlush>
        {table}
      </Card>
      {dialogs}
    </Page>
  );
}
