// What is set of a tenant, apart from its limits.
import { count } from "../../lib/format.ts";
import { limitsWords } from "../../lib/limits.ts";
import type { Summary } from "../../lib/tenants.ts";
import { Card } from "../../ui/card.tsx";
import { KeyValues } from "../../ui/key-values.tsx";

const MODELS_SHOWN = 12;

function modelsWords(models: string[] | null) {
  if (models === null) return "all";
  if (!models.length) return "none";
  const more = models.length - MODELS_SHOWN;
  return `${models.slice(0, MODELS_SHOWN).join(", ")}${more > 0 ? `, and ${more} more` : ""}`;
}

export function SettingsCard({ tenant }: { tenant: Summary }) {
  const { settings, in_file, currency } = tenant;
  return (
    <Card title="Settings" span={5} id="settings">
      <KeyValues
        rows={[
          ["Source", in_file ? "router.yaml" : tenant.etag ? "stored" : "not stored"],
          ["Models", modelsWords(settings.models)],
          ["Weight", count(settings.weight)],
          ["Class", settings.priority],
          ["Tokens that may wait", settings.queue_tokens === null ? "its share of the queue" : count(settings.queue_tokens)],
          ["Shares requests to servers", settings.join ? "yes" : "no"],
          Object.keys(settings.end_user_limits).length > 0 && ["Each end user", limitsWords(settings.end_user_limits, currency)],
          settings.certificates.length > 0 && ["Client certificates", settings.certificates.join(", ")],
        ]}
      />
    </Card>
  );
}
