// A number that is read at one look. href: the page that explains it.
import type { ComponentChildren } from "preact";
import { Sparkline } from "./sparkline.tsx";
import type { Tone } from "./badge.tsx";

export interface StatProps {
  label: string;
  value: ComponentChildren;
  note?: ComponentChildren;
  tone?: Tone;
  values?: (number | null)[];
  href?: string;
  id?: string;
}

export function Stat({ label, value, note, tone, values, href, id }: StatProps) {
  const content = (
    <>
      <span class="stat-label">{label}</span>
      <span class="stat-value">{value}</span>
      {note && <span class="stat-note">{note}</span>}
      {values && <Sparkline values={values} />}
    </>
  );
  const name = `stat${tone ? ` tone-${tone}` : ""}`;
  return href ? (
    <a class={name} href={href} id={id}>
      {content}
    </a>
  ) : (
    <div class={name} id={id}>
      {content}
    </div>
  );
}
