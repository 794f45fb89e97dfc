// Light, dark, or as the system: remembered in this browser.
import { useEffect, useState } from "preact/hooks";

const STORED = "gateway.theme";
export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const changed = new Set<() => void>();

export function currentTheme(): Theme {
  const stored = localStorage.getItem(STORED);
  return stored === "light" || stored === "dark" ? stored : "system";
}

function apply() {
  const theme = currentTheme();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const notify of changed) notify();
}

export function chooseTheme(theme: Theme) {
  if (theme === "system") localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, theme);
  apply();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
apply();

// Grows with each change of colors, for what draws with them on a canvas.
export function useThemeTurn() {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const notify = () => setTurn((count) => count + 1);
    changed.add(notify);
    return () => void changed.delete(notify);
  }, []);
  return turn;
}

export const colorOf = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
