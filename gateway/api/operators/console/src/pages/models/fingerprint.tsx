// The fingerprint of a vector space: its beginning is shown, the whole is copied.
import { NONE } from "../../lib/format.ts";
import { CopyButton } from "../../ui/copy-button.tsx";

const SHOWN = 8;

export const Fingerprint = ({ text, isWhole }: { text: string | null | undefined; isWhole?: boolean }) =>
  text ? (
    <span class="print">
      <code title={text}>{isWhole ? text : text.slice(0, SHOWN)}</code>
      <CopyButton isIcon text={text} label={`Copy the fingerprint ${text}`} />
    </span>
  ) : (
    <>{NONE}</>
  );
