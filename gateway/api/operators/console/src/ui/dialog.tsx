// A dialog or a panel at the side, by the browser's own element: it keeps the focus inside, closes by Escape, and gives
// the focus back to what opened it. Unsaved changes are asked about first.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { X } from "lucide";
import { Button } from "./button.tsx";

export interface DialogProps {
  title: string;
  note?: ComponentChildren;
  onClose: () => void;
  children: ComponentChildren;
  // Buttons at the end, which stay in sight.
  actions?: ComponentChildren;
  isPanel?: boolean;
  // Closing asks first.
  isDirty?: boolean;
  // What closing asks, where it is not about changes.
  question?: { text: string; leave: string; stay: string };
  id?: string;
  // What a form inside does; the content is a form then.
  onSubmit?: () => void;
}

const UNSAVED = { text: "Your changes are not saved.", leave: "Discard them", stay: "Keep editing" };

export function Dialog(props: DialogProps) {
  const { title, note, onClose, children, actions, isPanel, isDirty, question = UNSAVED, id, onSubmit } = props;
  const place = useRef<HTMLDialogElement>(null);
  const heading = useId();
  const [isAsking, setAsking] = useState(false);
  useEffect(() => {
    const opener = document.activeElement;
    place.current?.showModal();
    return () => {
      if (opener instanceof HTMLElement && opener.isConnected) opener.focus();
    };
  }, []);
  const asked = useRef<Element | null>(null);
  // The focus goes back to what had it: outside of the dialog, its keys would not come here.
  const stay = () => {
    setAsking(false);
    const before = asked.current;
    if (before instanceof HTMLElement && before.isConnected && place.current?.contains(before)) before.focus();
    else place.current?.focus();
  };
  // While it asks, only the button discards: leaving again goes back.
  const leave = () => {
    if (isAsking) return stay();
    if (!isDirty) return onClose();
    asked.current = document.activeElement;
    setAsking(true);
  };
  const content = (
    <>
      <header class="dialog-head">
        <div>
          <h2 id={heading}>{title}</h2>
          {note && <p class="note">{note}</p>}
        </div>
        <Button kind="ghost" icon={X} label="Close" onClick={leave} />
      </header>
      <div class="dialog-body">{children}</div>
      {isAsking ? (
        <div class="dialog-foot asking" role="alert">
          <span>{question.text}</span>
          <Button kind="danger" onClick={onClose}>
            {question.leave}
          </Button>
          <Button onClick={stay}>{question.stay}</Button>
        </div>
      ) : (
        actions && <footer class="dialog-foot">{actions}</footer>
      )}
    </>
  );
  return (
    <dialog
      ref={place}
      id={id}
      class={isPanel ? "panel" : "modal"}
      aria-labelledby={heading}
      // Browsers close it at a second Escape in a row without asking; not if the key is handled here.
      onKeyDown={(event) => {
        if (event.key !== "Escape" || event.defaultPrevented || event.isComposing) return;
        event.preventDefault();
        leave();
      }}
      tabIndex={-1}
      // Closed by the browser all the same: it is asked about like any other way to leave.
      onClose={() => {
        place.current?.showModal();
        leave();
      }}
      onCancel={(event) => {
        event.preventDefault();
        leave();
      }}
      onPointerDown={(event) => {
        if (event.target === place.current) leave();
      }}
    >
      {onSubmit ? (
        <form
          class="dialog-content"
          autocomplete="off"
          noValidate
          onSubmit={(event) => {
            event.preventDefault();
            onSubmit();
          }}
        >
          {content}
        </form>
      ) : (
        <div class="dialog-content">{content}</div>
      )}
    </dialog>
  );
}
