// Upstreams.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Upstreams() {
  return (
    <Page title="Upstreams">
      <Skeleton />
    </Page>
  );
}
