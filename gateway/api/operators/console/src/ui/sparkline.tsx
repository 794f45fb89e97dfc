// The course of a number, without axes. A text beside it has the number.
const WIDTH = 120;
const HEIGHT = 28;

export function Sparkline({ values }: { values: (number | null)[] }) {
  const most = Math.max(0, ...values.map((value) => value ?? 0)) || 1;
  const step = WIDTH / Math.max(1, values.length - 1);
  let path = "";
  let isOpen = false;
  values.forEach((value, index) => {
    if (value === null) {
      isOpen = false;
      return;
    }
    const y = HEIGHT - 2 - (value / most) * (HEIGHT - 4);
    path += `${isOpen ? "L" : "M"}${(index * step).toFixed(1)} ${y.toFixed(1)}`;
    isOpen = true;
  });
  return (
    <svg class="sparkline" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path d={path} fill="none" stroke="currentColor" stroke-width="1.5" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
