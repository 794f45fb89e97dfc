// Models.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Models() {
  return (
    <Page title="Models">
      <Skeleton />
    </Page>
  );
}
