// The colors of the strips.
export const HealthLegend = () => (
  <span class="health-legend">
    {["up", "probation", "down", "drained"].map((state) => (
      <span key={state}>
        <span class={`swatch health-${state}`} />
        {state}
      </span>
    ))}
  </span>
);
