// One small text next to the pointer or to a focused element, above all else. It repeats what another element says to
// screen readers.
let place: HTMLElement | null = null;

export function showTip(text: string, x: number, y: number) {
  if (!place) {
    place = document.createElement("div");
    place.className = "tip";
    place.setAttribute("aria-hidden", "true");
  }
  // A dialog covers what is outside of it.
  const open = document.querySelectorAll("dialog[open]");
  (open[open.length - 1] ?? document.body).append(place);
  place.textContent = text;
  const left = Math.max(8, Math.min(x - place.offsetWidth / 2, innerWidth - place.offsetWidth - 8));
  const above = y - place.offsetHeight - 8;
  place.style.left = `${left}px`;
  place.style.top = `${above > 4 ? above : y + 26}px`;
}

export const hideTip = () => place?.remove();
