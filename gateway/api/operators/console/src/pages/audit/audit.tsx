// Audit.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Audit() {
  return (
    <Page title="Audit">
      <Skeleton />
    </Page>
  );
}
