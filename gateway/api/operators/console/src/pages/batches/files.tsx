// Results and errors of a batch, as files of the browser. Only the tenant of a batch may read them.
import { Download } from "lucide";
import { RequestError, send } from "../../lib/api.ts";
import { saveFile } from "../../lib/csv.ts";
import { bytes } from "../../lib/format.ts";
import { useAction } from "../../lib/load.ts";
import { Button } from "../../ui/button.tsx";
import { Problem } from "../../ui/states.tsx";
import { notify } from "../../ui/toast.tsx";
import type { Batch } from "./batch.ts";

// A page keeps a whole file in memory before the browser writes it.
const DOWNLOAD_BYTES_MAX = 256e6;

async function download(fileId: string) {
  const path = `/v1/files/${encodeURIComponent(fileId)}`;
  const { content: file } = await send<{ bytes: number; filename: string }>(path);
  if (file.bytes > DOWNLOAD_BYTES_MAX) {
    throw new RequestError(0, `${bytes(file.bytes)} are too much for a page: use gateway batch fetch`);
  }
  const { content } = await send<string>(`${path}/content`, { as: "text" });
  saveFile(content, "application/jsonl", file.filename);
  notify(`${file.filename}, ${bytes(file.bytes)}, is saved.`);
}

export function Files({ batch }: { batch: Batch }) {
  const fetched = useAction(download);
  const files = [
    { name: "Results", id: batch.output_file_id },
    { name: "Errors", id: batch.error_file_id },
  ];
  return (
    <div class="stack">
      <div class="row">
        {files.map(
          ({ name, id }) =>
            id && (
              <Button key={name} icon={Download} busy={fetched.busy} onClick={() => void fetched.run(id)}>
                {name}
              </Button>
            ),
        )}
      </div>
      <Problem>{fetched.problem?.message}</Problem>
    </div>
  );
}
