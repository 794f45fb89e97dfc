// Batches.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Batches() {
  return (
    <Page title="Batches">
      <Skeleton />
    </Page>
  );
}
