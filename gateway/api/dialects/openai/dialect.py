"""OpenAI's and Azure's API: embeddings and models."""

from typing import Any

import msgspec

from gateway.api.dialects.openai import embeddings, models
from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.document.fields import NORMALIZE, PACKED, REFUSED, TEXTS
from gateway.api.server.dialect import Dialect, KeyHeader

EXAMPLES: dict[type[msgspec.Struct], Any] = {OpenAIEmbeddingsRequest: {"model": "bge", "input": TEXTS}}
MEANINGS = {
    "embedding_type": "Number format of the vectors, or a list of formats. It overrides `encoding_format`.",
    "encoding_type": "The same as `embedding_type`.",
    "late_chunking": (
        "Whether the model reads all inputs as one text and returns a vector for each part of it. Refused "
        "if the model cannot."
    ),
    "late_chunking_params": (
        "Cuts each input into chunks of `chunk_size` tokens, special ones included, and returns a vector for "
        "each chunk, computed with its whole input in view."
    ),
    "LateChunkingParams.chunk_size": "Tokens of each chunk, special ones included.",
    "normalized": "Whether vectors are scaled to length 1. By default they are.",
    "return_multivector": "Whether one vector is returned for each token instead of one for each input.",
    "return_tokenized_input": "Refused if true: `/tokenize` returns the tokens of a text.",
    "task": "Task for which the inputs are embedded, which selects their prompt or the output.",
    "OpenAIEmbeddingsRequest.input": (
        "One text or a list of texts; or token ids, if the model's config specifies their vocabulary. The "
        "gateway's config bounds their number."
    ),
    "OpenAIEmbeddingsRequest.truncate": (
        "Whether an input longer than the model takes is cut, or the end at which it is cut; `NONE` refuses"
        " it instead."
    ),
    "OpenAIEmbeddingsRequest.encoding_format": PACKED,
    "OpenAIEmbeddingsRequest.normalize": NORMALIZE,
    "InputObject.text": "The input.",
    "InputObject.image": "The input as an image: base64 or a `data:` URI.",
    "InputObject.url": "The same as `image`.",
    "InputObject.bytes": "The same as `image`.",
    "InputObject.pdf": REFUSED,
    "InputObject.video": REFUSED,
    "InputObject.audio": "The input as a recording: base64 or a `data:` URI.",
    "InputObject.content": "The input as parts of texts, images and recordings, which have one vector.",
}
DIALECT = Dialect(
    handlers=[*embeddings.HANDLERS, *models.HANDLERS],
    tags={"OpenAI": "Embeddings and models, with the fields that Jina, NIM, Voyage and vLLM add."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
AZURE = Dialect(
    handlers=[embeddings.deployment_embeddings],
    tags={"Azure": "The embeddings paths of Azure OpenAI."},
    key_header=KeyHeader("api-key", "azure", "The key as Azure's clients send it."),
)
