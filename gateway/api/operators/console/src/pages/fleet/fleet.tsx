// Fleet.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Fleet() {
  return (
    <Page title="Fleet">
      <Skeleton />
    </Page>
  );
}
