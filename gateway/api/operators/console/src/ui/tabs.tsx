// Tabs, as the ARIA pattern describes them: one stop for the Tab key, arrows choose.
import { useRef } from "preact/hooks";
import type { IconNode } from "lucide";
import { Icon } from "./icon.tsx";

export interface Tab {
  name: string;
  title: string;
  icon?: IconNode;
}

export interface TabsProps {
  label: string;
  tabs: Tab[];
  chosen: string;
  onChoose: (name: string) => void;
}

export function Tabs({ label, tabs, chosen, onChoose }: TabsProps) {
  const list = useRef<HTMLDivElement>(null);
  const step = (event: KeyboardEvent) => {
    const at = tabs.findIndex(({ name }) => name === chosen);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const index = (next + tabs.length) % tabs.length;
    onChoose(tabs[index]!.name);
    list.current?.querySelectorAll<HTMLButtonElement>("[role=tab]")[index]?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label={label} ref={list} onKeyDown={step}>
      {tabs.map(({ name, title, icon }) => (
        <button
          key={name}
          type="button"
          role="tab"
          aria-selected={name === chosen}
          tabIndex={name === chosen ? 0 : -1}
          onClick={() => onChoose(name)}
        >
          {icon && <Icon of={icon} size={16} />}
          {title}
        </button>
      ))}
    </div>
  );
}
