// A share of the whole as a bar. The number beside it says the same.
export const ShareBar = ({ share }: { share: number }) => (
  <span class="share-bar" aria-hidden="true">
    <span style={{ width: `${Math.max(0.5, Math.min(100, share * 100))}%` }} />
  </span>
);
