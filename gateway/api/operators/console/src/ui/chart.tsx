// A chart over time by uPlot: hovering shows the values, drawing a span zooms, a click in the legend hides a line. Its
// values are also a table, for people who do not see the picture.
import { useEffect, useRef, useState } from "preact/hooks";
import UPlot from "uplot";
import { moment, NONE } from "../lib/format.ts";
import { useThemeTurn } from "../lib/theme.ts";
import { optionsOf, type Series } from "./chart-options.ts";
import { Empty } from "./states.tsx";

export type { Series } from "./chart-options.ts";

const HEIGHT = 190;
const ROWS = 24;

export interface ChartProps {
  title: string;
  // Seconds since 1970.
  times: number[];
  series: Series[];
  format: (value: number) => string;
  onZoom?: (fromS: number, untilS: number) => void;
  height?: number;
  // Shown in place of a chart without a value.
  empty?: string;
  // A value a day: its time is the day alone.
  isDaily?: boolean;
}

export function Chart({ title, times, series, format, onZoom, height = HEIGHT, empty, isDaily = false }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const when = (atS: number | undefined) => moment(atS, isDaily ? "day" : "minute");
  const plot = useRef<UPlot | null>(null);
  const [hidden, setHidden] = useState<Set<string>>(new Set());
  const [hover, setHover] = useState<{ index: number; left: number } | null>(null);
  const turn = useThemeTurn();
  const drawn = series.map((line) => (hidden.has(line.name) ? { ...line, values: line.values.map(() => null) } : line));
  const data = [times, ...drawn.map(({ values }) => values)] as UPlot.AlignedData;
  const latest = useRef({ data, onZoom, format });
  latest.current = { data, onZoom, format };
  const hasValues = series.some(({ values }) => values.some((value) => value !== null));
  const lines = series.map(({ name }) => name).join();
  useEffect(() => {
    const box = place.current;
    if (!box) return undefined;
    const options = optionsOf({
      width: box.clientWidth,
      height,
      series,
      format: (value) => latest.current.format(value),
      onHover: (index, left) => setHover(index === null || left < 0 ? null : { index, left }),
      isDaily,
      onZoom: onZoom && ((fromS, untilS) => latest.current.onZoom?.(fromS, untilS)),
    });
    plot.current = new UPlot(options, latest.current.data, box);
    const resized = new ResizeObserver(() => {
      if (box.clientWidth) plot.current?.setSize({ width: box.clientWidth, height });
    });
    resized.observe(box);
    return () => {
      resized.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [turn, hasValues, height, lines]);
  useEffect(() => plot.current?.setData(data), [times, series, hidden]);
  const shown = (value: number | null | undefined) => (value === null || value === undefined ? NONE : format(value));
  const at = hover && hover.index < times.length ? hover.index : times.length - 1;
  const toggle = (name: string) =>
    setHidden((before) => {
      const next = new Set(before);
      if (!next.delete(name)) next.add(name);
      return next;
    });
  if (!hasValues) return <Empty title={empty ?? "No values in this time"} />;
  const spoken = series.map(({ name, values }) => `${name} ${shown(values.at(-1))}`).join(", ");
  return (
    <figure class="chart" aria-label={title}>
      <figcaption>
        {series.map(({ name, color, values }) => (
          <button key={name} type="button" class="legend" aria-pressed={!hidden.has(name)} onClick={() => toggle(name)}>
            <span class={`swatch bg-${color}`} />
            {name} <b>{shown(values[at])}</b>
          </button>
        ))}
        <span class="legend-time">{times.length ? when(times[at]) : ""}</span>
      </figcaption>
      <div ref={place} class="plot" role="img" aria-label={`${title}: ${spoken}`} />
      <details>
        <summary>As a table</summary>
        <div class="scroll" role="region" aria-label={`${title}, last values`} tabIndex={0}>
          <table class="plain">
            <thead>
              <tr>
                <th scope="col">{isDaily ? "day" : "until"}</th>
                {series.map(({ name }) => (
                  <th scope="col" class="number" key={name}>
                    {name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {times.map((_, index) => index).slice(-ROWS).reverse().map((index) => (
                <tr key={index}>
                  <td>{when(times[index])}</td>
                  {series.map(({ name, values }) => (
                    <td class="number" key={name}>
                      {shown(values[index])}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </figure>
  );
}
