// Code in several languages, of which the chosen one is remembered.
import { useId, useState } from "preact/hooks";
import { CopyButton } from "./copy-button.tsx";
import { Tabs } from "./tabs.tsx";

const STORED = "gateway.language";

export function Code({ samples, label = "Language" }: { samples: Record<string, string>; label?: string }) {
  const id = useId();
  const languages = Object.keys(samples);
  const [wanted, setWanted] = useState(() => localStorage.getItem(STORED) ?? "");
  const language = languages.includes(wanted) ? wanted : (languages[0] ?? "");
  const choose = (name: string) => {
    localStorage.setItem(STORED, name);
    setWanted(name);
  };
  const text = samples[language] ?? "";
  return (
    <div class="code">
      <div class="code-head">
        <Tabs label={label} tabs={languages.map((name) => ({ name, title: name }))} chosen={language} onChoose={choose} />
        <CopyButton text={text} target={`${id}-code`} />
      </div>
      <pre id={`${id}-code`} tabIndex={0}>
        {text}
      </pre>
    </div>
  );
}
