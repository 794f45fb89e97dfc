// One file, chosen or dropped.
import { useId, useRef } from "preact/hooks";
import { X } from "lucide";
import { Button } from "../../ui/button.tsx";

export interface FileFieldProps {
  label: string;
  hint?: string;
  accept: string;
  file: File | null;
  onChange: (file: File | null) => void;
}

export function FileField({ label, hint, accept, file, onChange }: FileFieldProps) {
  const id = useId();
  const input = useRef<HTMLInputElement>(null);
  return (
    <div
      class="field drop"
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        onChange(event.dataTransfer?.files[0] ?? null);
      }}
    >
      <label for={id}>{label}</label>
      <input
        id={id}
        ref={input}
        type="file"
        accept={accept}
        aria-describedby={hint ? `${id}-hint` : undefined}
        onChange={(event) => onChange(event.currentTarget.files?.[0] ?? null)}
      />
      {hint && (
        <p class="note" id={`${id}-hint`}>
          {hint}
        </p>
      )}
      {file && (
        <Button
          isSmall
          kind="ghost"
          icon={X}
          onClick={() => {
            if (input.current) input.current.value = "";
            onChange(null);
          }}
        >
          Remove {file.name}
        </Button>
      )}
    </div>
  );
}
