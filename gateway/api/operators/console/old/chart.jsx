// A chart of the last hour by uPlot. Its last points are also a table, for people who do not see the picture.
import { useEffect, useRef } from "preact/hooks";
import UPlot from "uplot";
import { clock, NONE } from "./format.js";
import { Table } from "./parts.jsx";

const HEIGHT = 150;
const ROWS = 12;
const SHORT_S = 600;
const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Points without a neighbor, of which a line shows nothing.
function lonePoints({ data }, series) {
  const isLone = (at) => data[series][at] !== null && data[series][at - 1] == null && data[series][at + 1] == null;
  return data[0].map((_, at) => at).filter(isLone);
}

function optionsOf(series, width, format, characters) {
  const axis = { stroke: colorOf("faint"), grid: { stroke: colorOf("line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [
      { ...axis, size: 30, values: (_, splits) => splits.map((at) => clock(at).slice(0, characters)) },
      { ...axis, size: 62, values: (_, splits) => splits.map(format) },
    ],
    series: [
      {},
      ...series.map(({ color, dash }) => ({ stroke: colorOf(color), width: 2, dash, points: { size: 5, filter: lonePoints } })),
    ],
  };
}

// series: {name, values, color, dash}; a color is the name of a variable of the stylesheet.
export function Chart({ title, times, series, format }) {
  const place = useRef(null);
  const chart = useRef(null);
  const data = [times, ...series.map(({ values }) => values)];
  const latest = useRef(data);
  latest.current = data;
  // Hours and minutes; in the first minutes seconds too.
  const characters = times.at(-1) - times[0] > SHORT_S ? 5 : 8;
  useEffect(() => {
    const draw = () => {
      chart.current?.destroy();
      const options = optionsOf(series, place.current.clientWidth, format, characters);
      chart.current = new UPlot(options, latest.current, place.current);
    };
    draw();
    let width = place.current.clientWidth;
    const resized = new ResizeObserver(([entry]) => {
      const now = Math.floor(entry.contentRect.width);
      if (now && now !== width) {
        width = now;
        chart.current.setSize({ width, height: HEIGHT });
      }
    });
    resized.observe(place.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", draw);
      chart.current?.destroy();
      chart.current = null;
    };
  }, [characters]);
  useEffect(() => chart.current?.setData(data));
  const last = (values) => values.at(-1) ?? null;
  const shown = (value) => (value === null ? NONE : format(value));
  const spoken = series.map(({ name, values }) => `${name} ${shown(last(values))}`).join(", ");
  const rows = times.slice(-ROWS).map((at, index) => {
    const place = Math.max(0, times.length - ROWS) + index;
    return [clock(at), ...series.map(({ values }) => shown(values[place]))];
  });
  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        {series.map(({ name, color, dash, values }) => (
          <span class="legend">
            <svg width="22" height="8" aria-hidden="true">
              <line x1="0" y1="4" x2="22" y2="4" class={`stroke-${color}`} stroke-dasharray={dash?.join(" ")} />
            </svg>
            {name} {shown(last(values))}
          </span>
        ))}
      </figcaption>
      <div ref={place} role="img" aria-label={`${title}: ${spoken}`} />
      <details>
        <summary>As a table</summary>
        <Table
          label={`${title}, last points`}
          columns={[["until"], ...series.map(({ name }) => [name, "number"])]}
          rows={rows.reverse()}
        />
      </details>
    </figure>
  );
}
