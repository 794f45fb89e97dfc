// The mark of the product, in the color of the accent.
export const Logo = ({ size = 28 }: { size?: number }) => (
  <svg class="logo" width={size} height={size} viewBox="0 0 32 32" aria-hidden="true">
    <rect width="32" height="32" rx="8" fill="currentColor" />
    <g fill="none" stroke="var(--on-accent)" stroke-width="2.4" stroke-linecap="round">
      <path d="M7 9h5l8 14h5M7 16h18M7 23h5l8-14h5" />
    </g>
  </svg>
);
