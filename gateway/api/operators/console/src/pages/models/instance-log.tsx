// The last lines of an instance's log.
import { RefreshCw } from "lucide";
import { get, named } from "../../lib/api.ts";
import { plural } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { CopyButton } from "../../ui/copy-button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Failure, Skeleton } from "../../ui/states.tsx";

interface Log {
  lines: string[];
  total_lines: number;
}

export function InstanceLog({ name, onClose }: { name: string; onClose: () => void }) {
  const { content, problem, reload } = useLoad(() => get<Log>(named("/admin/instances", name, "/logs")), null, name);
  const text = content?.lines.join("\n") ?? "";
  return (
    <Dialog
      isPanel
      id="instance-log"
      title={`Log of ${name}`}
      note={content && plural(content.total_lines, "line")}
      onClose={onClose}
      actions={
        <>
          <CopyButton text={text} />
          <Button icon={RefreshCw} onClick={reload}>
            Read it again
          </Button>
        </>
      }
    >
      <Failure problem={problem} />
      {!content && !problem && <Skeleton rows={8} />}
      {content && (
        <pre class="log" tabIndex={0} aria-label={`Log of ${name}`}>
          {text || "It has written nothing yet."}
        </pre>
      )}
    </Dialog>
  );
}
