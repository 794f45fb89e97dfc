// Colors of actions: green adds, red takes away, blue changes.
import type { Tone } from "../../ui/badge.tsx";

const TONES: Record<string, Tone> = {
  create: "good",
  undrain: "good",
  start: "good",
  change: "info",
  restore: "info",
  rotate: "info",
  reload: "info",
  remove: "bad",
  revoke: "bad",
  drain: "warn",
  stop: "warn",
  cancel: "warn",
};

export const toneOfAction = (action: string): Tone => TONES[action] ?? "quiet";
