// Recent calls.
import { Page } from "../../ui/page.tsx";
import { Skeleton } from "../../ui/states.tsx";

export function Calls() {
  return (
    <Page title="Recent calls">
      <Skeleton />
    </Page>
  );
}
