// A short message about what was done, read out by screen readers. It goes after some seconds, or when it is closed.
import { useEffect, useState } from "preact/hooks";
import { CircleCheck, X } from "lucide";
import { Button } from "./button.tsx";
import { Icon } from "./icon.tsx";

const SHOWN_MS = 8000;
let show: (text: string) => void = () => {};

export const notify = (text: string) => show(text);

export function Toasts() {
  const [text, setText] = useState("");
  useEffect(() => {
    show = setText;
  }, []);
  useEffect(() => {
    if (!text) return undefined;
    const timer = setTimeout(() => setText(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <div class="toasts" role="status">
      {text && (
        <div class="toast">
          <Icon of={CircleCheck} />
          <span>{text}</span>
          <Button kind="ghost" isSmall icon={X} label="Close the message" onClick={() => setText("")} />
        </div>
      )}
    </div>
  );
}
