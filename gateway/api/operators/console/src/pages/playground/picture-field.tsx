// Pictures, chosen or dropped, with their thumbnails.
import { useId, useRef } from "preact/hooks";
import { X } from "lucide";
import { Button } from "../../ui/button.tsx";
import { IMAGE_TYPES, type Picture, type usePictures } from "./pictures.ts";

export const Thumbnail = ({ picture }: { picture: Picture }) => (
  <img class="thumbnail" src={picture.url} alt={picture.file.name} title={picture.file.name} />
);

export function PictureField({ state }: { state: ReturnType<typeof usePictures> }) {
  const id = useId();
  const input = useRef<HTMLInputElement>(null);
  const { pictures, problem, add, clear } = state;
  return (
    <div
      id="images-drop"
      class="field drop"
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        add(event.dataTransfer?.files ?? []);
      }}
    >
      <label for={id}>Images, chosen or dropped here</label>
      <input id={id} ref={input} type="file" accept={IMAGE_TYPES} multiple onChange={(event) => add(event.currentTarget.files ?? [])} />
      <div class="row" id="images-chosen">
        {pictures.map((picture) => (
          <Thumbnail key={picture.url} picture={picture} />
        ))}
      </div>
      {pictures.length > 0 && (
        <Button
          isSmall
          kind="ghost"
          icon={X}
          onClick={() => {
            if (input.current) input.current.value = "";
            clear();
          }}
        >
          Remove all images
        </Button>
      )}
      {problem && (
        <p id="images-problem" class="field-error" role="alert">
          {problem}
        </p>
      )}
    </div>
  );
}
