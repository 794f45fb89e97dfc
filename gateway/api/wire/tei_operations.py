"""TEI's operations by the abilities of a model, for the paths whose body does not say which one it is.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/server.rs.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import EmbedReply, EncodeReply, Operation, Output, Reply, RerankReply
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.inputs import Dimensions, InputReader
from gateway.api.wire.tei_bodies import (
    EmbedRequest,
    SimilarityInputs,
    SimilarityRequest,
    TeiEncodeRequest,
    TeiRerankRequest,
    decode_embed,
    decode_rerank,
    decode_similarity,
    decode_sparse,
    encode_rerank,
    term_items,
)
from gateway.api.wire.tei_predictions import PredictRequest, decode_predict, encode_predictions, is_batch
from gateway.api.wire.tei_truncation import Direction
from gateway.calls import Call

# Body as plain values, model, context, api → the call of one operation.
DecodeBody: TypeAlias = Callable[[Any, str, RequestContext, InputReader], Awaitable[Call]]


class DefaultRequest(msgspec.Struct, omit_defaults=True):
    """The body of any of the operations: `inputs`, or for a reranker `query` and `texts`.

    A source sentence with sentences can only ask for similarity, whatever the model's default operation.
    """

    inputs: str | list[str | Integer | list[str | Integer]] | SimilarityInputs | UnsetType = UNSET
    query: str | UnsetType = UNSET
    texts: list[str] | UnsetType = UNSET
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None
    raw_scores: bool = False
    return_text: bool = False
    parameters: dict[str, Any] | None = None
    model: ModelName | None = None


async def _embed(body: Any, model: str, context: RequestContext, api: InputReader) -> Call:
    return await decode_embed(msgspec.convert(body, EmbedRequest), model, context, api)


async def _embed_sparse(body: Any, model: str, context: RequestContext, api: InputReader) -> Call:
    return await decode_sparse(msgspec.convert(body, TeiEncodeRequest), model, context, api)


async def _predict(body: Any, model: str, _: RequestContext, api: InputReader) -> Call:
    return decode_predict(msgspec.convert(body, PredictRequest), model, api)


async def _similarity(body: Any, model: str, _: RequestContext, api: InputReader) -> Call:
    return decode_similarity(msgspec.convert(body, SimilarityRequest), model, api)


async def _rerank(body: Any, model: str, _: RequestContext, api: InputReader) -> Call:
    return decode_rerank(msgspec.convert(body, TeiRerankRequest), model, api)


class DefaultOperation(NamedTuple):
    """Operation of a body. decode: returns its call. encode: returns the reply to a body as JSON."""

    decode: DecodeBody
    encode: Callable[[Any, Reply], bytes]


def _embedded(_: Any, reply: Reply) -> bytes:
    assert isinstance(reply, EmbedReply)
    return json_bytes(list(reply.vectors))


def _weighted(_: Any, reply: Reply) -> bytes:
    assert isinstance(reply, EncodeReply)
    return json_bytes([term_items(terms) for terms in reply.sparse or ()])


def _predicted(body: Any, reply: Reply) -> bytes:
    return encode_predictions(reply, batch=is_batch(body["inputs"]))


def _compared(_: Any, reply: Reply) -> bytes:
    assert isinstance(reply, RerankReply)
    return json_bytes(reply.scores)


def _ranked(body: Any, reply: Reply) -> bytes:
    assert isinstance(reply, RerankReply)
    return encode_rerank(reply, body["texts"] if body.get("return_text") else None)


EMBED = DefaultOperation(_embed, _embedded)
EMBED_SPARSE = DefaultOperation(_embed_sparse, _weighted)
PREDICT = DefaultOperation(_predict, _predicted)
SIMILARITY = DefaultOperation(_similarity, _compared)
RERANK = DefaultOperation(_rerank, _ranked)


def default_of(operations: frozenset[Operation], outputs: frozenset[Output]) -> DefaultOperation:
    """Return the default operation of a model with these abilities.

    A classifier of one label is a reranker, as in TEI.
    """
    if Operation.RERANK in operations:
        return RERANK
    if Operation.CLASSIFY in operations:
        return PREDICT
    if Output.SPARSE in outputs and Operation.EMBED not in operations:
        return EMBED_SPARSE
    return EMBED


def operation_of(data: DefaultRequest, model: str, api: InputReader) -> DefaultOperation:
    """Return the operation of a body: the model's default, or similarity.

    Raises: the errors of `InputReader.capabilities_of`.
    """
    capabilities = api.capabilities_of(model, Operation.EMBED)
    if isinstance(data.inputs, SimilarityInputs):
        return SIMILARITY
    return default_of(capabilities.operations, capabilities.outputs) if capabilities else EMBED
