// Playground.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Playground() {
  return (
    <Page title="Playground">
      <Skeleton />
    </Page>
  );
}
