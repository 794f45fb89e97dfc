// Keys.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Keys() {
  return (
    <Page title="Keys">
      <Skeleton />
    </Page>
  );
}
