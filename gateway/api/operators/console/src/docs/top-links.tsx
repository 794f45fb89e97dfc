// The ways out of this page, and the theme.
import { Braces, LayoutDashboard, Monitor, Moon, Sun } from "lucide";
import { chooseTheme, currentTheme, THEMES, useThemeTurn } from "../lib/theme.ts";
import { Button } from "../ui/button.tsx";
import { Icon } from "../ui/icon.tsx";

const ICONS = { system: Monitor, light: Sun, dark: Moon };

export function TopLinks({ consoleAddress, address }: { consoleAddress: string; address: string }) {
  useThemeTurn();
  const theme = currentTheme();
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "system";
  return (
    <div class="docs-foot">
      {consoleAddress && (
        <a href={consoleAddress}>
          <Icon of={LayoutDashboard} size={16} />
          Console
        </a>
      )}
      <a href={address}>
        <Icon of={Braces} size={16} />
        OpenAPI
      </a>
      <Button kind="ghost" isSmall icon={ICONS[theme]} label={`Colors: ${theme}; change to ${next}`} onClick={() => chooseTheme(next)} />
    </div>
  );
}
