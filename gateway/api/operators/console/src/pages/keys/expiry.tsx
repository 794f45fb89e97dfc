// When a key ends: marked if that is soon, or over.
import { duration, moment } from "../../lib/format.ts";
import { Badge } from "../../ui/badge.tsx";

const SOON_S = 14 * 86_400;

export function Expiry({ expires }: { expires: number | null }) {
  if (expires === null) return <span class="note">never</span>;
  const leftS = expires - Date.now() / 1000;
  const text = moment(expires);
  if (leftS <= 0) return <Badge value="expired" label={`expired ${duration(-leftS)} ago`} />;
  if (leftS <= SOON_S) {
    return (
      <span title={text}>
        <Badge value="expiring" label={`in ${duration(leftS)}`} />
      </span>
    );
  }
  return <span class="nowrap">{text}</span>;
}
