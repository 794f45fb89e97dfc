// Replicas of a model that take no calls now, each with the reason.
import { useStatus } from "../../lib/status.ts";
import type { Replica } from "../../lib/types.ts";

const SERVING = ["up", "probation"];
const SHOWN = 5;

function useDown(model: string | null): Replica[] {
  const { snapshot } = useStatus();
  const found = snapshot?.models.find(({ name }) => name === model);
  if (!snapshot || !found) return [];
  const names = [found.upstream, ...found.upstreams.map(({ name }) => name)];
  return snapshot.replicas.filter(({ upstream, state }) => names.includes(upstream) && !SERVING.includes(state));
}

// otherwise: the advice if all of them serve again, or the model is gone.
export function DownReplicas({ model, otherwise }: { model: string | null; otherwise: string }) {
  const down = useDown(model);
  if (!down.length) return <p>{otherwise}</p>;
  return (
    <div id="down-replicas">
      <p>Start the server of a replica again, or correct its address. Now:</p>
      <ul class="replicas">
        {down.slice(0, SHOWN).map(({ upstream, name, state, reason }) => (
          <li key={`${upstream} ${name}`}>
            <code>{name}</code> {`is ${state}${reason ? `: ${reason}` : ""}`}
          </li>
        ))}
      </ul>
      {down.length > SHOWN && <p class="note">{`and ${down.length - SHOWN} more`}</p>}
    </div>
  );
}
