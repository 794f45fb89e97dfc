// When a key ends: marked if that is soon, or over.
import { duration } from "../../lib/format.ts";
import { Badge } from "../../ui/badge.tsx";

const SOON_S = 14 * 86_400;

export function Expiry({ expires }: { expires: number | null }) {
  if (expires === null) return <span class="note">never</span>;
  const leftS = expires - Date.now() / 1000;
  // In UTC, as the date is set.
  const text = `${new Date(expires * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  if (leftS <= 0) return <Badge value="expired" label={`expired ${duration(-leftS)} ago`} />;
  if (leftS <= SOON_S) {
    return (
      <span title={text}>
        <Badge value="expiring" label={`in ${duration(leftS)}`} />
      </span>
    );
  }
  return <span title={text}>{text.slice(0, 10)}</span>;
}
