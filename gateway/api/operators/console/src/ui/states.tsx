// A place without content: not read yet, nothing there, or a failure.
import type { ComponentChildren } from "preact";
import { CircleAlert, type IconNode, Inbox } from "lucide";
import type { RequestError } from "../lib/api.ts";
import { Icon } from "./icon.tsx";

export function Skeleton({ rows = 3, height = 18 }: { rows?: number; height?: number }) {
  return (
    <div class="skeleton" role="status" aria-label="Loading">
      {Array.from({ length: rows }, (_, index) => (
        <span key={index} style={{ height: `${height}px` }} />
      ))}
    </div>
  );
}

export interface EmptyProps {
  title: string;
  // What to do next.
  children?: ComponentChildren;
  action?: ComponentChildren;
  icon?: IconNode;
}

export function Empty({ title, children, action, icon = Inbox }: EmptyProps) {
  return (
    <div class="empty">
      <Icon of={icon} size={28} />
      <p class="empty-title">{title}</p>
      {children && <p class="note">{children}</p>}
      {action}
    </div>
  );
}

export function Problem({ children, id }: { children?: ComponentChildren; id?: string }) {
  if (!children) return null;
  return (
    <div class="problem" role="alert" id={id}>
      <Icon of={CircleAlert} size={17} />
      <div>{children}</div>
    </div>
  );
}

export const Note = ({ children, id }: { children?: ComponentChildren; id?: string }) => (
  <p class="note" id={id}>
    {children}
  </p>
);

// A failed request: its words, unless there is no key yet, which the sign-in screen says.
export const Failure = ({ problem, id }: { problem: RequestError | null; id?: string }) =>
  problem && !problem.isKeyMissing ? <Problem id={id}>{problem.message}</Problem> : null;
