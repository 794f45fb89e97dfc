// What concerns every page of operators: the gateway does not answer, its store is away, it was taken out.
import { moment } from "../lib/format.ts";
import { useStatus } from "../lib/status.ts";
import { Problem } from "../ui/states.tsx";

export function Banner() {
  const { snapshot, problem, atS } = useStatus();
  if (problem?.status === 404) {
    return <Problem id="status-problem">The pages of operators are on the address admin.listen of router.yaml.</Problem>;
  }
  if (problem && !problem.isKeyMissing && problem.status !== 403) {
    const seen = atS ? ` Last seen at ${moment(atS, "second")}; what is below is from then.` : "";
    return <Problem id="status-problem">{`${problem.message}; asking again.${seen}`}</Problem>;
  }
  if (snapshot?.store.away) {
    return (
      <Problem id="store-problem">
        {`The quota store is unavailable${snapshot.store.reason ? `: ${snapshot.store.reason}` : "."}`}
      </Problem>
    );
  }
  return null;
}
