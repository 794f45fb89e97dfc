// Passages of a file: rows of a table, lines, or paragraphs of a text, cut where they are long.
import { RequestError } from "../../lib/api.ts";

export interface Passage {
  text: string;
  place: string;
}

export const FILE_BYTES_MAX = 4_000_000;
export const PASSAGES_MAX = 2000;
const PASSAGE_CHARACTERS = 1500;

// Sentences are kept together where they fit.
function pieces(text: string) {
  if (text.length <= PASSAGE_CHARACTERS) return [text];
  const found: string[] = [];
  let piece = "";
  for (const sentence of text.split(/(?<=[.!?。！？])\s+/)) {
    for (let at = 0; at < sentence.length; at += PASSAGE_CHARACTERS) {
      const part = sentence.slice(at, at + PASSAGE_CHARACTERS);
      if (piece && piece.length + part.length + 1 > PASSAGE_CHARACTERS) {
        found.push(piece);
        piece = part;
      } else piece = piece ? `${piece} ${part}` : part;
    }
  }
  return piece ? [...found, piece] : found;
}

function rowText(line: string) {
  try {
    const row = JSON.parse(line);
    if (typeof row === "string") return row;
    return String(row.text ?? row.content ?? row.body ?? Object.values(row).filter((value) => typeof value === "string").join(" "));
  } catch {
    return line;
  }
}

export function passagesOf(name: string, content: string): Passage[] {
  const isRows = /\.(jsonl|ndjson|csv|tsv)$/i.test(name);
  const parts = isRows ? content.split(/\r?\n/) : content.split(/\r?\n\s*\r?\n/);
  const unit = isRows ? "line" : "paragraph";
  const found = parts.flatMap((part, index) => {
    const text = (isRows ? rowText(part) : part).replaceAll(/\s+/g, " ").trim();
    return text ? pieces(text).map((piece) => ({ text: piece, place: `${unit} ${index + 1}` })) : [];
  });
  if (!found.length) throw new RequestError(0, `${name} has no text.`);
  if (found.length > PASSAGES_MAX) {
    throw new RequestError(0, `${name} has ${found.length} passages; at most ${PASSAGES_MAX} are searched here.`);
  }
  return found;
}
