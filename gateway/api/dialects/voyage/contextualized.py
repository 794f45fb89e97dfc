"""Voyage's and Perplexity's contextualized embeddings: one vector for each chunk of each document.

Source: Voyage's API reference, contextualized chunk embeddings, and voyageai 0.5.0, which asks for base64
by default; Perplexity's client perplexityai 0.36.0, whose embeddings are bytes in base64.
Rule: no document is split. One that is longer than the model is refused, as both vendors do.
"""

from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import ChunkSize, EmbedChunks, EmbedChunksReply, Operation
from gateway.api.server.body import INTEGER_MAX, ModelName
from gateway.api.server.encoding import (
    Encoding,
    LazyList,
    PackedFormat,
    QuantizedType,
    packed_type,
)
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import Dimensions, check_token_vectors
from gateway.api.wire.replies import vector_list
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput

Documents = list[list[str]]
# Of a chunk that is made here, if the request states no size. Voyage documents no default.
CHUNK_TOKENS = 512
# Chunks are made by the tokens of the model.
CHUNKER_VERSION = "tokens"
# Fields that Perplexity does not have.
VOYAGES = (
    "inputs",
    "output_dimension",
    "output_dtype",
    "enable_auto_chunking",
    "chunk_size",
    "chunk_overlap",
)


class ContextualizedRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/contextualizedembeddings: `inputs` with Voyage's options, or `input` with Perplexity's.

    inputs, input: the chunks of each document in order; a lone chunk can be a query, too. dimensions,
    output_dimension: width of the vectors. encoding_format: `base64` packs the numbers of `output_dtype`;
    Perplexity's formats pack 8 bits or 1 bit for each number, and are `base64_int8` without one.
    enable_auto_chunking: each document is one text, which is cut into chunks of chunk_size tokens of the
    model, of which neighbours share chunk_overlap.
    """

    inputs: Documents | UnsetType = UNSET
    input: Documents | UnsetType = UNSET
    model: ModelName | None = None
    input_type: Literal["query", "document"] | None = None
    output_dimension: Dimensions | None = None
    dimensions: Dimensions | None = None
    output_dtype: Literal["float"] | QuantizedType | None = None
    encoding_format: Literal["float", "base64"] | PackedFormat | None = None
    enable_auto_chunking: bool | None = None
    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)] | None = None
    chunk_overlap: Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)] | None = None

    @property
    def field(self) -> Literal["inputs", "input"]:
        """Name of the field of the documents."""
        return "inputs" if self.input is UNSET else "input"

    def documents(self) -> Documents:
        """Return the documents. Raises: InvalidInput."""
        if isinstance(self.input, UnsetType):
            if isinstance(self.inputs, UnsetType):
                raise InvalidInput(
                    "`inputs` is missing: a list of the chunks of each document", param="inputs"
                )
            return self.inputs
        for name in VOYAGES:
            if getattr(self, name) not in (None, UNSET):
                raise InvalidInput(f"`{name}` is Voyage's: send it with `inputs`, not `input`", param=name)
        return self.input

    def encoding(self) -> Encoding:
        """Return the format of the vectors. Raises: InvalidInput."""
        quantized = packed_type(self.encoding_format)
        if quantized is not None and self.output_dtype is not None:
            raise InvalidInput(
                f"send `output_dtype`, or `{self.encoding_format}` as `encoding_format`, not both",
                param="output_dtype",
            )
        if self.encoding_format is None and self.field == "input":
            quantized = "int8"
        if quantized is not None:
            return Encoding((quantized,), packed=True)
        kind = self.output_dtype or "float"
        return Encoding((kind,), packed=self.encoding_format == "base64")

    def width(self) -> int | None:
        """Return the requested width of the vectors. Raises: InvalidInput."""
        widths = {self.dimensions, self.output_dimension} - {None}
        if len(widths) > 1:
            raise InvalidInput("send `dimensions` or `output_dimension`, one of them", param="dimensions")
        return next(iter(widths), None)

    def size(self) -> ChunkSize | None:
        """Return the size of the chunks that are made, None if they are given. Raises: InvalidInput."""
        if not self.enable_auto_chunking:
            for name in ("chunk_size", "chunk_overlap"):
                if getattr(self, name) is not None:
                    raise InvalidInput(f"`{name}` needs `enable_auto_chunking`", param=name)
            return None
        if self.input_type != "document":
            raise InvalidInput(
                "`enable_auto_chunking` needs `input_type` `document`", param="enable_auto_chunking"
            )
        size = ChunkSize(self.chunk_size or CHUNK_TOKENS, self.chunk_overlap or 0, joins_ends=True)
        if size.overlap >= size.tokens:
            raise InvalidInput("`chunk_overlap` is not below `chunk_size`", param="chunk_overlap")
        return size


class ChunkEmbedding(msgspec.Struct, omit_defaults=True):
    """The vector of one chunk. index: its place in the document. text: of a chunk that was made here."""

    embedding: list[float] | str
    index: int
    text: str | None = None
    object: Literal["embedding"] = "embedding"


class DocumentEmbeddings(msgspec.Struct):
    """The vectors of one document, in the order of its chunks. index: its place in the request."""

    data: list[ChunkEmbedding]
    index: int
    object: Literal["list"] = "list"


class ContextualizedUsage(msgspec.Struct):
    """Tokens of all documents, with special tokens."""

    prompt_tokens: int
    total_tokens: int


class ContextualizedResponse(msgspec.Struct, omit_defaults=True):
    """Vectors by document, in the order of the request. chunker_version: only with auto-chunking."""

    data: list[DocumentEmbeddings]
    model: str
    usage: ContextualizedUsage
    chunker_version: str | None = None
    object: Literal["list"] = "list"


def decode_contextualized(request: Request[ContextualizedRequest]) -> Call:
    """Decode a body. Raises: EmptyInput, InvalidInput."""
    data, api, model = request.body, request.api, request.model
    field, documents, size = data.field, data.documents(), data.size()
    # Each chunk counts as an input.
    api.check_count(sum(map(len, documents)), field)
    for index, chunks in enumerate(documents):
        if not chunks or "" in chunks:
            raise EmptyInput(f"`{field}` {index} has no chunk, or an empty one", param=field)
    capabilities = api.capabilities_of(model, Operation.EMBED, request.context.tenant)
    if capabilities is not None and not capabilities.late_chunking:
        raise InvalidInput(
            "this model embeds no chunks in the context of their document: that needs mean pooling "
            f"(its pooling: {capabilities.pooling or 'not known'}) in the gateway's own engine, or a hosted "
            "model that does it; send the texts to /v1/embeddings",
            param="model",
        )
    if size is not None:
        if any(len(chunks) > 1 for chunks in documents):
            raise InvalidInput(
                "with `enable_auto_chunking` each document is one text: join its chunks", param=field
            )
        texts = [chunks[0] for chunks in documents]
        check_token_vectors(texts, field, capabilities, size.tokens - size.overlap)
    work = EmbedChunks(tuple(map(tuple, documents)), size, dimensions=data.width())
    return Call(work, model, role=data.input_type)


@inference(
    "/v1/contextualizedembeddings",
    "/contextualizedembeddings",
    errors=OPENAI,
    reply=ContextualizedResponse,
    description="One vector for each chunk of each document",
    tags=["Cohere and Jina"],
)
async def contextualized_embeddings(request: Request[ContextualizedRequest]) -> HttpReply:
    """Turn the chunks of documents into vectors, each with its whole document in view.

    Takes Voyage's `inputs` and Perplexity's `input`. The model reads the chunks of a document as one text,
    which is late chunking; a document that is longer than the model is refused.
    """
    return await _serve(request)


@inference(
    "/perplexity/v1/contextualizedembeddings",
    errors=OPENAI,
    reply=ContextualizedResponse,
    description="One vector for each chunk of each document",
    tags=["Cohere and Jina"],
    below_models=False,
)
async def perplexity_contextualized(request: Request[ContextualizedRequest]) -> HttpReply:
    """Turn the chunks of documents into vectors: the same as `/v1/contextualizedembeddings`."""
    return await _serve(request)


async def _serve(request: Request[ContextualizedRequest]) -> HttpReply:
    data = request.body
    encoding = data.encoding()
    call = decode_contextualized(request)
    served, reply = await request.serve(call, EmbedChunksReply)
    usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    body: dict[str, Any] = {"object": "list", "model": served.route.model, "usage": usage}
    if reply.ranges is not None:
        body["chunker_version"] = CHUNKER_VERSION
    return await request.reply(served, body | {"data": items_of(reply, data.documents(), encoding)})


def items_of(reply: EmbedChunksReply, documents: Documents, encoding: Encoding) -> LazyList:
    """Return the vectors of the chunks of each document, with their texts if the gateway made the chunks."""

    def document_item(index: int, span: slice, document: Sequence[str]) -> dict[str, Any]:
        def item(row: int, vector: Any) -> dict[str, Any]:
            found = {"object": "embedding", "index": row, "embedding": vector}
            if reply.ranges is not None:
                start, stop = reply.ranges[span.start + row].characters or (0, 0)
                found["text"] = document[0][start:stop]
            return found

        return {"object": "list", "index": index, "data": vector_list(reply.vectors[span], encoding, item)}

    items = map(document_item, count(), reply.spans, documents)
    return LazyList(items, len(documents), reply.vectors.size)
