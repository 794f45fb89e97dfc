// A part of a page with a title, and what can be done there.
import type { ComponentChildren } from "preact";

export interface CardProps {
  title?: ComponentChildren;
  note?: ComponentChildren;
  actions?: ComponentChildren;
  children?: ComponentChildren;
  id?: string;
  // Columns of the grid of 12 that it takes at 1280; all on a phone.
  span?: 3 | 4 | 5 | 6 | 7 | 8 | 9 | 12;
  // Without space around the content, for tables.
  isFlush?: boolean;
}

export function Card({ title, note, actions, children, id, span = 12, isFlush }: CardProps) {
  return (
    <section class={`card span-${span}${isFlush ? " flush" : ""}`} id={id}>
      {(title || actions) && (
        <header class="card-head">
          <div>
            {title && <h2>{title}</h2>}
            {note && <p class="note">{note}</p>}
          </div>
          {actions && <div class="actions">{actions}</div>}
        </header>
      )}
      {children}
    </section>
  );
}

export const Grid = ({ children, id }: { children: ComponentChildren; id?: string }) => (
  <div class="grid" id={id}>
    {children}
  </div>
);
