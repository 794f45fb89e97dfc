// Copies a text. Where the browser offers no clipboard (plain HTTP on another machine) the text is selected.
import { useState } from "preact/hooks";
import { Check, Copy } from "lucide";
import { Button } from "./button.tsx";

export interface CopyButtonProps {
  text: string;
  target?: string;
  label?: string;
  // Only the icon is shown.
  isIcon?: boolean;
}

export function CopyButton({ text, target, label = "Copy", isIcon }: CopyButtonProps) {
  const [done, setDone] = useState("");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      setDone("Copied");
    } catch {
      const place = target && document.getElementById(target);
      if (place) getSelection()?.selectAllChildren(place);
      setDone(place ? "Selected; press Ctrl+C" : "This browser offers no clipboard here");
    }
  }
  return (
    <span class="copy">
      <Button isSmall kind="ghost" icon={done === "Copied" ? Check : Copy} label={isIcon ? label : undefined} onClick={copy}>
        {isIcon ? undefined : label}
      </Button>
      <span class="note" role="status">
        {done}
      </span>
    </span>
  );
}
