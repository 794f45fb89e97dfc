// The buttons of an instance's row.
import { FileText, Play, RotateCw, Square, Trash2 } from "lucide";
import type { Instance } from "../../lib/types.ts";
import { Button } from "../../ui/button.tsx";

export type Verb = "start" | "stop" | "restart" | "remove" | "logs";

export interface InstanceActionsProps {
  instance: Instance;
  canChange: boolean;
  busy: boolean;
  onAct: (verb: Verb) => void;
}

const STOPPED = ["stopped", "failed"];

export function InstanceActions({ instance, canChange, busy, onAct }: InstanceActionsProps) {
  const { name, status } = instance;
  const button = (verb: Verb, icon: typeof Play, label: string) => (
    <Button key={verb} isSmall kind="ghost" icon={icon} label={`${label} ${name}`} disabled={busy} onClick={() => onAct(verb)} />
  );
  const isStopped = STOPPED.includes(status);
  return (
    <>
      {canChange && isStopped && button("start", Play, "Start")}
      {canChange && !isStopped && button("stop", Square, "Stop")}
      {canChange && button("restart", RotateCw, "Restart")}
      {button("logs", FileText, "Logs of")}
      {canChange && button("remove", Trash2, "Remove")}
    </>
  );
}
