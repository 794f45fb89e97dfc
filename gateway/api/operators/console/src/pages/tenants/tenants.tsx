// Tenants.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Tenants() {
  return (
    <Page title="Tenants">
      <Skeleton />
    </Page>
  );
}
