// A button, or a link that looks like one.
import type { ComponentChildren } from "preact";
import type { IconNode } from "lucide";
import { Icon } from "./icon.tsx";

export interface ButtonProps {
  children?: ComponentChildren;
  onClick?: (event: MouseEvent) => void;
  href?: string;
  // primary: the one action of a place. danger: it cannot be undone.
  kind?: "primary" | "plain" | "ghost" | "danger";
  type?: "button" | "submit";
  icon?: IconNode;
  // Only the icon is shown; `label` is its name.
  label?: string;
  // The whole name of a button whose text is shorter, such as Drain in a row. It begins with the text.
  ariaLabel?: string;
  busy?: boolean;
  disabled?: boolean;
  isSmall?: boolean;
  id?: string;
}

export function Button(props: ButtonProps) {
  const { children, kind = "plain", type = "button", icon, label, busy, isSmall, href, onClick, id } = props;
  const name = `button ${kind}${isSmall ? " small" : ""}${children ? "" : " only-icon"}`;
  const content = (
    <>
      {icon && <Icon of={icon} size={isSmall ? 15 : 16} />}
      {children}
    </>
  );
  if (href !== undefined) {
    return (
      <a id={id} class={name} href={href} aria-label={props.ariaLabel ?? label} title={children ? undefined : label} onClick={onClick}>
        {content}
      </a>
    );
  }
  return (
    <button
      id={id}
      class={name}
      type={type}
      aria-label={props.ariaLabel ?? label}
      title={children ? undefined : label}
      aria-busy={busy}
      disabled={props.disabled || busy}
      onClick={onClick}
    >
      {content}
    </button>
  );
}
