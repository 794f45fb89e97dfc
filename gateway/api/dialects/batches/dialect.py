"""OpenAI's files and batches."""

from typing import Any

import msgspec

from gateway.api.dialects.batches import batches, files
from gateway.api.dialects.batches.batches import BatchRequest
from gateway.api.server.dialect import Dialect

EXAMPLES: dict[type[msgspec.Struct], Any] = {
    BatchRequest: {
        "input_file_id": "file-3f0a5d5e",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
}
MEANINGS = {
    "completion_window": "`24h`.",
    "endpoint": "Path of every request in the file: `/v1/embeddings`, `/v2/rerank` or `/score`.",
    "input_file_id": "File of requests, which was uploaded with the purpose `batch`.",
    "metadata": "Texts by name that are shown with the batch, at most 16.",
    "output_expires_after": "Time for which the results are kept. By default `batches.keep_s` decides.",
    "ExpiresAfter.seconds": "Time after the end of the batch, from an hour to 30 days.",
    "ExpiresAfter.anchor": "`created_at`: the results are created when the batch ends.",
    "FileForm.purpose": "`batch`.",
    "FileForm.file": "JSON Lines: one request in each line, with `custom_id`, `method`, `url` and `body`.",
    "FileForm.expires_after[anchor]": "`created_at`.",
    "FileForm.expires_after[seconds]": "Time for which the file is kept, from an hour to 30 days.",
}
DIALECT = Dialect(
    handlers=[*files.HANDLERS, *batches.HANDLERS],
    tags={"Batches": "OpenAI's files and batches: many requests in one file."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
