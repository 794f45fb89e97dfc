// Takes the gateway that answers this page out of its load balancers, or puts it back. Of another gateway its own page
// or command does it, because each listens for itself.
import { useState } from "preact/hooks";
import { Power, Undo2 } from "lucide";
import { send } from "../../lib/api.ts";
import { useAccess } from "../../shell/access.ts";
import { Button } from "../../ui/button.tsx";
import { Confirm } from "../../ui/confirm.tsx";
import { notify } from "../../ui/toast.tsx";
import type { FleetMember } from "./member.ts";

export function DrainButton({ member, onDone, isOnly }: { member: FleetMember; onDone: () => void; isOnly: boolean }) {
  const { canChange } = useAccess();
  const [isAsking, setAsking] = useState(false);
  const isOut = member.drained_since_s !== null;
  if (!canChange || !member.is_this) return null;
  const change = async () => {
    await send(isOut ? "/admin/undrain" : "/admin/drain", { method: "POST" });
    notify(isOut ? `${member.name} was put back.` : `${member.name} was taken out.`);
    onDone();
  };
  return (
    <>
      <Button icon={isOut ? Undo2 : Power} onClick={() => setAsking(true)}>
        {isOut ? "Put this gateway back" : "Take this gateway out"}
      </Button>
      {isAsking && (
        <Confirm
          title={isOut ? `Put ${member.name} back?` : `Take ${member.name} out?`}
          verb={isOut ? "Put it back" : "Take it out"}
          isDanger={!isOut}
          action={change}
          onClose={() => setAsking(false)}
        >
          {isOut ? (
            <p>/readyz and gRPC's health report it as ready again, and load balancers send it calls.</p>
          ) : (
            <>
              <p>
                /readyz and gRPC's health report that it is drained, so that load balancers send it no more calls. Calls that
                arrive are served. It lasts until it is put back, or until the gateway stops.
              </p>
              {isOnly && <p class="field-error">It is the only gateway that is ready: its callers get no other one.</p>}
            </>
          )}
        </Confirm>
      )}
    </>
  );
}
