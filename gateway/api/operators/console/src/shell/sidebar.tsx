// Navigation: groups of pages with icons, who is signed in, and the theme. On a phone it is a drawer.
import { useEffect, useRef } from "preact/hooks";
import { LogIn, LogOut, Menu, Monitor, Moon, Sun, X } from "lucide";
import { readRoute } from "../lib/route.ts";
import { chooseTheme, currentTheme, THEMES, useThemeTurn } from "../lib/theme.ts";
import { Button } from "../ui/button.tsx";
import { Icon } from "../ui/icon.tsx";
import { Logo } from "./logo.tsx";
import { API_ICON, type ConsolePage } from "./pages.ts";

const THEME_ICONS = { system: Monitor, light: Sun, dark: Moon };

export interface SidebarProps {
  pages: ConsolePage[];
  current: string;
  // Who is signed in: the tenant's and the key's name, or that no key is needed here.
  who: string;
  hasKey: boolean;
  onSignIn: () => void;
  onSignOut: () => void;
}

function Links({ pages, current }: Pick<SidebarProps, "pages" | "current">) {
  const groups = [...new Set(pages.map(({ group }) => group))];
  return (
    <nav aria-label="Pages">
      {groups.map((group) => (
        <div class="nav-group" key={group}>
          <p class="nav-title">{group}</p>
          {pages
            .filter((page) => page.group === group)
            .map(({ name, title, icon }) => (
              <a key={name} href={`#/${name}`} aria-current={name === current ? "page" : undefined}>
                <Icon of={icon} />
                {title}
              </a>
            ))}
          {group === "Use" && (
            <a href="/docs">
              <Icon of={API_ICON} />
              API
            </a>
          )}
        </div>
      ))}
    </nav>
  );
}

function ThemeButton() {
  useThemeTurn();
  const theme = currentTheme();
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  return (
    <Button kind="ghost" isSmall icon={THEME_ICONS[theme]} label={`Colors: ${theme}; change to ${next}`} onClick={() => chooseTheme(next)} />
  );
}

function Foot({ who, hasKey, onSignIn, onSignOut }: Pick<SidebarProps, "who" | "hasKey" | "onSignIn" | "onSignOut">) {
  return (
    <div class="nav-foot">
      <span class="clip" id="signed-in" title={who}>
        {who}
      </span>
      <ThemeButton />
      {hasKey ? (
        <Button kind="ghost" isSmall icon={LogOut} label="Sign out" onClick={onSignOut} />
      ) : (
        <Button kind="ghost" isSmall icon={LogIn} label="Sign in" onClick={onSignIn} />
      )}
    </div>
  );
}

export function Sidebar(props: SidebarProps) {
  const drawer = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const close = () => drawer.current?.close();
    addEventListener("hashchange", close);
    return () => removeEventListener("hashchange", close);
  }, []);
  const title = props.pages.find(({ name }) => name === readRoute().page)?.title ?? "";
  return (
    <>
      <aside class="sidebar">
        <a class="brand" href="#/">
          <Logo />
          <span>Embedding gateway</span>
        </a>
        <Links {...props} />
        <Foot {...props} />
      </aside>
      <header class="topbar">
        <Button kind="ghost" icon={Menu} label="Open the navigation" onClick={() => drawer.current?.showModal()} />
        <Logo size={24} />
        <span class="clip">{title || "Embedding gateway"}</span>
        <ThemeButton />
      </header>
      <dialog
        class="drawer"
        ref={drawer}
        aria-label="Navigation"
        onPointerDown={(event) => {
          if (event.target === drawer.current) drawer.current?.close();
        }}
      >
        <div class="drawer-content">
          <div class="drawer-head">
            <Logo />
            <Button kind="ghost" icon={X} label="Close the navigation" onClick={() => drawer.current?.close()} />
          </div>
          <Links {...props} />
          <Foot {...props} />
        </div>
      </dialog>
    </>
  );
}
