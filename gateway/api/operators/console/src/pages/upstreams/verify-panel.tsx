// Compares the vectors of an upstream's replicas, as `gateway verify` does.
import { useState } from "preact/hooks";
import { Scale } from "lucide";
import { send } from "../../lib/api.ts";
import { useAction } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Select } from "../../ui/field.tsx";
import { Problem, Skeleton } from "../../ui/states.tsx";
import { type Verification, VerifyOutcome } from "./verify-outcome.tsx";

export interface VerifyPanelProps {
  upstreams: string[];
  // Chosen at first.
  upstream?: string;
  onClose: () => void;
}

export function VerifyPanel({ upstreams, upstream, onClose }: VerifyPanelProps) {
  const [chosen, setChosen] = useState(upstream ?? upstreams[0] ?? "");
  const { busy, problem, outcome, run } = useAction(async () => {
    const { content } = await send<Verification>("/admin/replicas/verify", { body: { upstreams: [chosen] } });
    return { name: chosen, report: content };
  });
  return (
    <Dialog
      isPanel
      id="verify"
      title="Compare vectors"
      note="Each replica embeds six fixed texts; equal replicas return equal vectors. Nothing of a request is used."
      onClose={onClose}
      onSubmit={() => void run()}
      actions={
        <>
          <Button onClick={onClose}>Close</Button>
          <Button kind="primary" type="submit" icon={Scale} busy={busy}>
            Verify
          </Button>
        </>
      }
    >
      <Select label="Upstream to compare" value={chosen} onChange={setChosen} options={upstreams} />
      <Problem>{problem?.message}</Problem>
      {busy && <Skeleton rows={4} height={26} />}
      {!busy && outcome?.name === chosen && <VerifyOutcome report={outcome.report} />}
    </Dialog>
  );
}
