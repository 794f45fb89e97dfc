// Cosines of vectors with vectors, from pale for 0 and below to deep blue for 1.
import type { ComponentChildren } from "preact";
import { cosine } from "../../lib/vectors.ts";

export function shadeOf(value: number) {
  const depth = Math.min(1, Math.max(0, value));
  return {
    backgroundColor: `hsl(226 ${45 + 35 * depth}% ${96 - 64 * depth}%)`,
    // At this depth black and white have the same contrast with the background.
    color: depth > 0.62 ? "#ffffff" : "#000000",
  };
}

function CosineCell({ left, right }: { left: number[]; right: number[] }) {
  if (left.length !== right.length) return <td>{`${left.length} ≠ ${right.length}`}</td>;
  const value = cosine(left, right);
  return <td style={shadeOf(value)}>{value.toFixed(3)}</td>;
}

export interface HeatMapProps {
  caption: string;
  names: string[];
  rows: number[][];
  // Without them, the rows again.
  columns?: number[][];
  heads?: ComponentChildren[];
}

export function HeatMap({ caption, names, rows, columns = rows, heads = columns.map((_, at) => String(at + 1)) }: HeatMapProps) {
  return (
    <div class="scroll" role="region" aria-label={caption} tabIndex={0}>
      <table class="plain heat">
        <caption>{caption}</caption>
        <thead>
          <tr>
            <td />
            {heads.map((head, at) => (
              <th scope="col" key={at}>
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((left, index) => (
            <tr key={index}>
              <th scope="row" dir="auto">{`${index + 1}. ${names[index] ?? ""}`}</th>
              {columns.map((right, at) => (
                <CosineCell left={left} right={right} key={at} />
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
