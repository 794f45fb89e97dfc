// Keys: those of all tenants.
import { Page } from "../../ui/page.tsx";
import { KeyCard } from "./key-card.tsx";

export function Keys() {
  return (
    <Page title="Keys" note="Secrets that identify tenants. The gateway keeps digests only, and shows a key once.">
      <KeyCard />
    </Page>
  );
}
