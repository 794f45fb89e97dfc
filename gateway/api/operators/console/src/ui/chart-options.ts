// How uPlot draws a chart: axes, lines, areas, and the zoom by drawing a span.
import UPlot from "uplot";
import { moment } from "../lib/format.ts";
import { colorOf } from "../lib/theme.ts";

export interface Series {
  name: string;
  values: (number | null)[];
  // A variable of the stylesheet.
  color: string;
  dash?: number[];
  isArea?: boolean;
}

export interface ChartOptions {
  width: number;
  height: number;
  series: Series[];
  format: (value: number) => string;
  // A value a day: each label is a whole day.
  isDaily?: boolean;
  onHover: (index: number | null, left: number) => void;
  onZoom?: (fromS: number, untilS: number) => void;
}

const DAY_S = 86_400;

// Of a date with a time, and of a time with seconds.
const LABEL_PX = 92;
const TIME_PX = 66;

// stepS: from one label to the next. Labels of less than a day have their time, so that no two are equal.
function timeOf(atS: number, spanS: number, stepS: number) {
  if (spanS > 3 * DAY_S) return stepS < DAY_S ? moment(atS).slice("2026-".length) : moment(atS, "day");
  return moment(atS, spanS > 600 ? "minute" : "second").slice("2026-11-28 ".length);
}

// Points without a neighbor, of which a line shows nothing.
function lonePoints({ data }: UPlot, series: number): number[] {
  const values = data[series]!;
  const isLone = (at: number) => values[at] != null && values[at - 1] == null && values[at + 1] == null;
  return Array.from(data[0], (_, at) => at).filter(isLone);
}

export function optionsOf({ width, height, series, format, isDaily, onHover, onZoom }: ChartOptions): UPlot.Options {
  const axis = { stroke: colorOf("faint"), grid: { stroke: colorOf("grid"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height,
    // A label is centered below its place, the last one too.
    padding: [8, 36, 0, 0],
    legend: { show: false },
    cursor: {
      x: true,
      y: false,
      points: { size: 7, width: 2 },
      drag: { x: Boolean(onZoom), y: false, setScale: false },
    },
    scales: { y: { range: (_, _least, most) => [0, most > 0 ? most * 1.12 : 1] } },
    axes: [
      {
        ...axis,
        size: 28,
        space: (_, _axis, min, max) => (max - min > 3 * DAY_S ? LABEL_PX : TIME_PX),
        ...(isDaily && { incrs: [1, 2, 7, 14, 28].map((days) => days * DAY_S) }),
        values: (plot, splits) => {
          const { min = 0, max = 0 } = plot.scales.x ?? {};
          const step = splits.length > 1 ? splits[1]! - splits[0]! : DAY_S;
          return splits.map((at) => (isDaily ? moment(at, "day") : timeOf(at, (max ?? 0) - (min ?? 0), step)));
        },
      },
      { ...axis, size: 58, space: 34, values: (_, splits) => splits.map((value) => format(value)) },
    ],
    hooks: {
      setCursor: [(plot) => onHover(plot.cursor.idx ?? null, plot.cursor.left ?? 0)],
      setSelect: [
        (plot) => {
          if (plot.select.width < 6 || !onZoom) return;
          const [from, until] = [plot.select.left, plot.select.left + plot.select.width];
          onZoom(plot.posToVal(from, "x"), plot.posToVal(until, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
    series: [
      {},
      ...series.map(({ color, dash, isArea }) => ({
        stroke: colorOf(color),
        fill: isArea ? `${colorOf(color)}26` : undefined,
        width: 2,
        dash,
        points: { size: 5, filter: lonePoints },
      })),
    ],
  };
}
