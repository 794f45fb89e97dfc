"""Chunks of documents in requests to hosted APIs, and the vectors of their replies.

Source: Voyage's API reference (contextualized chunk embeddings) and voyageai 0.5.0; Jina's OpenAPI
document 2026.04.02, whose `late_chunking` reads all inputs of a request as one document.
"""

from collections.abc import Sequence

from backends.contract import EmbedChunks, EmbedChunksReply, Truncate
from backends.contract.errors import BackendError, ReplicaFailed, UnsupportedWork
from backends.contract.refusals import refused_chunks
from backends.http.client import countdown
from backends.http.openai_wire import decode_documents
from backends.http.replies import check_dimensions, check_tokens, fit_vectors, run_some
from backends.openai.api import Body, OpenAIApi, OpenAIProfile, decode_vectors, failure
from backends.openai.shapes import DEFAULT_TYPE, ApiShape

# Of one call to one replica, where each document is a request.
REQUESTS_IN_FLIGHT = 8


def chunks_body(documents: Sequence[Sequence[str]], prompt_name: str | None, shape: ApiShape) -> Body:
    """Return the fields of a request for documents; Jina's has one."""
    kind = shape.input_type.get(prompt_name or DEFAULT_TYPE)
    type_: Body = {} if kind is None else {shape.type_field: kind}
    if shape.chunks == "lists":
        return {shape.inputs: documents} | type_
    # Nothing is cut: the API refuses a document that is longer than its model.
    whole = dict(shape.truncation[Truncate.ERROR])
    return {shape.inputs: documents[0], "late_chunking": True} | type_ | whole


async def embed_chunks(
    api: OpenAIApi, work: EmbedChunks, profile: OpenAIProfile, timeout_s: float
) -> EmbedChunksReply:
    """Embed the chunks of documents: in one request, or in one for each document. Raises: BackendError."""
    _check(work, profile, api.shape)
    remaining_s = countdown(timeout_s)
    if api.shape.chunks == "lists":
        return await _send(api, work, profile, remaining_s())

    async def send(index: int) -> EmbedChunksReply:
        try:
            return await _send(api, work.part(index, index + 1), profile, remaining_s())
        except BackendError as error:
            error.input_index = index
            raise

    replies = await run_some(send, range(len(work.inputs)), REQUESTS_IN_FLIGHT)
    return EmbedChunksReply.join(replies, range(len(replies)))


def _check(work: EmbedChunks, profile: OpenAIProfile, shape: ApiShape) -> None:
    """Check that the API computes what a request asks for. Raises: InvalidWork, UnsupportedWork."""
    if shape.chunks is None:
        raise refused_chunks()
    if work.size is not None:
        raise UnsupportedWork("this upstream cuts no texts into chunks: send the chunks")
    if not work.normalize:
        raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
    check_dimensions(work, profile.width)


async def _send(
    api: OpenAIApi, work: EmbedChunks, profile: OpenAIProfile, timeout_s: float
) -> EmbedChunksReply:
    """Send one request for documents. Raises: BackendError."""
    counts, shape = tuple(map(len, work.inputs)), api.shape
    body = chunks_body(work.inputs, work.prompt_name, shape)
    response = await api.send(body, profile, sum(counts), timeout_s)
    if response.status != 200:
        raise failure(response)
    if shape.chunks == "lists":
        vectors, tokens = decode_documents(response.body, counts, shape.dtype)
    else:
        vectors, tokens = decode_vectors(response.body, counts[0], shape)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    check_tokens(tokens, len(counts), profile.max_tokens)
    own = (tokens,) if len(counts) == 1 else None
    return EmbedChunksReply(fit_vectors(vectors, work), counts, tokens, input_tokens=own)
