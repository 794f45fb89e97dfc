// Warnings of the gateway about something that was saved.
import { TriangleAlert } from "lucide";
import { Button } from "../../ui/button.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import { Icon } from "../../ui/icon.tsx";

export function Notes({ notes }: { notes: string[] }) {
  if (!notes.length) return null;
  return (
    <ul class="notes">
      {notes.map((note) => (
        <li key={note}>
          <Icon of={TriangleAlert} size={16} />
          <span dir="auto">{note}</span>
        </li>
      ))}
    </ul>
  );
}

export function SavedNotes({ title, notes, onClose }: { title: string; notes: string[]; onClose: () => void }) {
  return (
    <Dialog
      title={title}
      note="The gateway has a note on it."
      onClose={onClose}
      actions={
        <Button kind="primary" onClick={onClose}>
          Continue
        </Button>
      }
    >
      <Notes notes={notes} />
    </Dialog>
  );
}
