// A page whose patches are colored by how well they answer the tokens of a question.
import { useEffect, useRef, useState } from "preact/hooks";
import { Select } from "../../ui/field.tsx";
import { Note } from "../../ui/states.tsx";

const PAGE_WIDTH = 800;

export interface PatchGrid {
  first: number;
  rows: number;
  columns: number;
}

export interface MarkedPageProps {
  picture: ImageBitmap;
  grid: PatchGrid;
  // By token of the question, of each patch.
  cosines: number[][];
  score: number;
}

// best: the best cosine of each patch with the chosen tokens, row by row.
function drawPatches(canvas: HTMLCanvasElement, picture: ImageBitmap, grid: PatchGrid, best: number[]) {
  canvas.width = PAGE_WIDTH;
  canvas.height = Math.max(1, Math.round((PAGE_WIDTH * picture.height) / picture.width));
  const context = canvas.getContext("2d");
  if (!context) return;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const [least, most] = [Math.min(...best), Math.max(...best)];
  const [width, height] = [canvas.width / grid.columns, canvas.height / grid.rows];
  best.forEach((value, index) => {
    const depth = most > least ? (value - least) / (most - least) : 0;
    context.fillStyle = `hsl(${240 - 240 * depth} 90% 50% / ${0.15 + 0.4 * depth})`;
    context.fillRect((index % grid.columns) * width, Math.floor(index / grid.columns) * height, width, height);
  });
}

export function MarkedPage({ picture, grid, cosines, score }: MarkedPageProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const names = ["all tokens of the question", ...cosines.map((_, index) => `token ${index + 1}`)];
  const [chosen, setChosen] = useState(0);
  const taken = chosen ? [cosines[chosen - 1] ?? []] : cosines;
  const best = (taken[0] ?? []).map((_, patch) => Math.max(...taken.map((ofToken) => ofToken[patch] ?? 0)));
  const place = best.indexOf(Math.max(...best));
  useEffect(() => {
    if (canvas.current) drawPatches(canvas.current, picture, grid, best);
  }, [chosen, picture]);
  const row = Math.floor(place / grid.columns) + 1;
  const column = (place % grid.columns) + 1;
  return (
    <>
      <Note>{`score ${score.toFixed(3)} · ${grid.rows} × ${grid.columns} patches · ${cosines.length} tokens`}</Note>
      <Select
        label="Mark by"
        value={String(chosen)}
        onChange={(value) => setChosen(Number(value))}
        options={names.map((name, index): [string, string] => [String(index), name])}
      />
      <canvas
        class="page-patches"
        ref={canvas}
        role="img"
        aria-label={`best patch: row ${row} of ${grid.rows}, column ${column} of ${grid.columns}`}
      />
    </>
  );
}
