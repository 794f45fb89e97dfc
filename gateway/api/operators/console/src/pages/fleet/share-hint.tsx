// A gateway without Redis is alone: what several of them on one Redis share, and how.
import { Network } from "lucide";
import { Card } from "../../ui/card.tsx";
import { Code } from "../../ui/code.tsx";
import { Icon } from "../../ui/icon.tsx";

const SAMPLES = {
  "router.yaml": "quotas:\n  store: redis://redis.internal:6379/0",
  "with TLS and a password": "quotas:\n  store: rediss://gateway:${REDIS_PASSWORD}@redis.internal:6379/0",
};

export const ShareHint = () => (
  <Card title="One gateway, without a Redis" id="fleet-alone">
    <div class="fleet-hint">
      <Icon of={Network} size={28} />
      <div class="stack">
        <p>
          Several gateways with the same Redis count limits together, share tenants, keys and names, and are all listed here. Set
          it in the configuration of each, and restart them:
        </p>
        <Code samples={SAMPLES} label="Setting" />
        <p class="note">
          Tenants and keys of this gateway move with gateway export and gateway restore. Limits are then counted in Redis; quotas.fail
          says what happens while it is away.
        </p>
      </div>
    </div>
  </Card>
);
