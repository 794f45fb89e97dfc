// Code that makes a first batch.
import { Code } from "../../ui/code.tsx";

const LINE = { custom_id: "page-1", method: "POST", url: "/v1/embeddings" };

export function FirstBatch({ model }: { model: string }) {
  const base = `${location.origin}/v1`;
  const line = JSON.stringify({ ...LINE, body: { model, input: "first page" } });
  const samples = {
    curl: `cat > pages.jsonl <<'END'
${line}
END
file=$(curl -s '${base}/files' \\
  -H "Authorization: Bearer $GATEWAY_API_KEY" \\
  -F purpose=batch -F file=@pages.jsonl | jq -r .id)
curl '${base}/batches' \\
  -H "Authorization: Bearer $GATEWAY_API_KEY" -H 'Content-Type: application/json' \\
  -d "{\\"input_file_id\\": \\"$file\\", \\"endpoint\\": \\"/v1/embeddings\\", \\"completion_window\\": \\"24h\\"}"`,
    Python: `import os
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=os.environ["GATEWAY_API_KEY"])
with open("pages.jsonl", "rb") as pages:
    file = client.files.create(file=pages, purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
)
print(batch.id, batch.status)`,
    "gateway batch": `gateway batch submit pages.jsonl --wait --url ${location.origin}
gateway batch fetch BATCH_ID --to vectors.jsonl --url ${location.origin}`,
  };
  return (
    <>
      <p class="note">Each line of pages.jsonl is one request, such as:</p>
      <pre tabIndex={0}>{line}</pre>
      <Code samples={samples} />
    </>
  );
}
