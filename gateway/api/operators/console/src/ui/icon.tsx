// Icons of Lucide (ISC license), drawn as elements of SVG. They say nothing by themselves: a text stands beside each.
import { h } from "preact";
import type { IconNode } from "lucide";

export function Icon({ of, size = 18, class: name = "" }: { of: IconNode; size?: number; class?: string }) {
  return (
    <svg
      class={`icon ${name}`}
      width={size}
      height={size}
      viewBox="0 0 24 24"
      fill="none"
      stroke="currentColor"
      stroke-width="1.75"
      stroke-linecap="round"
      stroke-linejoin="round"
      aria-hidden="true"
    >
      {of.map(([tag, attributes]) => h(tag, attributes))}
    </svg>
  );
}
