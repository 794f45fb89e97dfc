// Asks before an added name is removed.
import { removeAddition } from "../../lib/additions.ts";
import { Confirm } from "../../ui/confirm.tsx";
import { notify } from "../../ui/toast.tsx";

export interface RemoveNameProps {
  name: string;
  onClose: () => void;
  onRemoved: () => void;
}

export const RemoveName = ({ name, onClose, onRemoved }: RemoveNameProps) => (
  <Confirm
    title={`Remove the model ${name}?`}
    verb="Remove"
    isDanger
    onClose={onClose}
    action={async () => {
      await removeAddition("models", name);
      notify(`${name} is removed.`);
      onRemoved();
    }}
  >
    <p>Calls in flight finish. New calls with this name are refused.</p>
  </Confirm>
);
