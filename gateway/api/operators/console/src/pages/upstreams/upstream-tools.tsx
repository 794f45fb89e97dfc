// Above the upstreams: a filter, and whether only those with trouble are shown.
import type { ComponentChildren } from "preact";
import { Search } from "lucide";
import { Check } from "../../ui/field.tsx";
import { Icon } from "../../ui/icon.tsx";

export interface UpstreamToolsProps {
  sought: string;
  onSearch: (text: string) => void;
  isTrouble: boolean;
  onTrouble: (on: boolean) => void;
  children?: ComponentChildren;
}

export const UpstreamTools = ({ sought, onSearch, isTrouble, onTrouble, children }: UpstreamToolsProps) => (
  <div class="table-tools">
    <div class="search">
      <Icon of={Search} size={15} />
      <input
        type="search"
        aria-label="Filter: upstreams, replicas, models"
        placeholder="Name, address, reason"
        value={sought}
        autocomplete="off"
        spellcheck={false}
        dir="auto"
        onInput={(event) => onSearch(event.currentTarget.value)}
      />
    </div>
    <Check label="Only with trouble" checked={isTrouble} onChange={onTrouble} />
    <div class="table-place">{children}</div>
  </div>
);
