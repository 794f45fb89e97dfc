// Waits for the first call of a key, and says how it and those after it ended.
import { ArrowRight } from "lucide";
import { get, withQuery } from "../../lib/api.ts";
import { milliseconds, words } from "../../lib/format.ts";
import { useLoad } from "../../lib/load.ts";
import { href } from "../../lib/route.ts";
import type { Key } from "../../lib/tenants.ts";
import { Badge, toneOfStatus } from "../../ui/badge.tsx";
import { Button } from "../../ui/button.tsx";

const ASK_MS = 3000;

interface Call {
  at_s: number;
  status: number;
  outcome: string;
  duration_s: number;
  model: string | null;
}

export function FirstCall({ of, onLeave }: { of: Key; onLeave: () => void }) {
  const address = withQuery("/admin/calls", { key: of.id, tenant: of.tenant, fleet: true });
  const { content } = useLoad(() => get<{ calls: Call[] }>(address), ASK_MS, address);
  // A key of this id may have called before, and have been revoked.
  const calls = content?.calls.filter(({ at_s }) => at_s >= Math.floor(of.created ?? 0)) ?? [];
  const newest = calls[0];
  const title = calls.length > 1 ? "Newest call" : "First call";
  return (
    <div class="first-call" role="status">
      <span class="first-call-state">
        {newest ? (
          <>
            <Badge
              value={newest.outcome}
              tone={toneOfStatus(newest.status)}
              label={newest.status < 400 ? `${title}: ${newest.status}` : `${title}: ${newest.status} ${words(newest.outcome)}`}
            />
            <span class="note">{[newest.model, milliseconds(newest.duration_s)].filter(Boolean).join(", ")}</span>
          </>
        ) : (
          <>
            <span class="waiting" />
            <span class="note">Waiting for its first call; it appears here.</span>
          </>
        )}
      </span>
      <Button isSmall kind="ghost" icon={ArrowRight} href={href("calls", [], { key: of.id })} onClick={onLeave}>
        Recent calls of the key
      </Button>
      <Button isSmall kind="ghost" icon={ArrowRight} href={href("tenants", [of.tenant])} onClick={onLeave}>
        Its tenant
      </Button>
    </div>
  );
}
