// The keys of one tenant.
import { Card } from "../../ui/card.tsx";
import { useKeys } from "./use-keys.tsx";

export function KeyCard({ tenant, onChanged }: { tenant: string; onChanged: () => void }) {
  const { add, table, dialogs } = useKeys(tenant, onChanged);
  return (
    <>
      <Card title="Keys" id="keys" isFlush actions={add}>
        {table}
      </Card>
      {dialogs}
    </>
  );
}
