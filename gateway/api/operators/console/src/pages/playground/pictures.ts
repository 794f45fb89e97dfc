// The pictures of a form: at most twelve, each of at most 4 MB, as addresses that this page may show.
import { useState } from "preact/hooks";

const IMAGES_MAX = 12;
export const IMAGE_BYTES_MAX = 4_000_000;
export const IMAGE_TYPES = "image/png,image/jpeg,image/webp,image/gif";

export interface Picture {
  file: File;
  url: string;
}

export function usePictures() {
  const [pictures, setPictures] = useState<Picture[]>([]);
  const [problem, setProblem] = useState("");
  const add = (files: Iterable<File>) => {
    const given = [...files];
    const added = given.filter(({ type }) => type.startsWith("image/"));
    const room = IMAGES_MAX - pictures.length;
    const large = added.filter(({ size }) => size > IMAGE_BYTES_MAX).map(({ name }) => name);
    const taken = added.filter(({ size }) => size <= IMAGE_BYTES_MAX).slice(0, room);
    setPictures([...pictures, ...taken.map((file) => ({ file, url: URL.createObjectURL(file) }))]);
    const problems = [];
    if (large.length) problems.push(`larger than ${IMAGE_BYTES_MAX / 1e6} MB: ${large.join(", ")}`);
    if (added.length - large.length > room) problems.push(`at most ${IMAGES_MAX} images`);
    if (added.length < given.length) problems.push("only images are taken");
    setProblem(problems.join("; "));
  };
  const clear = () => {
    for (const { url } of pictures) URL.revokeObjectURL(url);
    setPictures([]);
    setProblem("");
  };
  return { pictures, problem, add, clear };
}
