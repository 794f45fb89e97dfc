// My key.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function MyKey() {
  return (
    <Page title="My key">
      <Skeleton />
    </Page>
  );
}
