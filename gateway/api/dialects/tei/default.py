"""Paths whose body does not say what it asks for: POST /, /invocations and /vertex.

They predict, rerank or embed as the model does. In the envelope of Google's Vertex AI are several bodies, of
which those with the same options are computed together.
Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/server.rs. huggingface_hub's client posts
to the base URL of a model, Amazon SageMaker to /invocations.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from backends.contract import (
    Classify,
    ClassifyReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Reply,
    RerankReply,
)
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import Dimensions, InputReader
from gateway.api.wire.tei import (
    Direction,
    EmbedRequest,
    PredictRequest,
    SimilarityInputs,
    SimilarityRequest,
    TeiEncodeRequest,
    TeiPrediction,
    TeiRank,
    TeiRerankRequest,
    TeiWeight,
    compute_headers,
    decode_embed,
    decode_predict,
    decode_rerank,
    decode_similarity,
    decode_sparse,
    encode_predictions,
    encode_rerank,
    is_batch,
    term_items,
)
from gateway.calls import Call, inputs_of
from gateway.errors import InvalidInput
from gateway.serve import Served

endpoint = partial(inference, errors=TEI, tags=["TEI"])
ANY_RESPONSE: Any = (
    list[list[float]]
    | list[list[TeiWeight]]
    | list[TeiRank]
    | list[TeiPrediction]
    | list[list[TeiPrediction]]
    | list[float]
)
# Calls run one after the other, each with a deadline of its own.
CALLS_MAX = 32
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


async def _serve(
    data: DefaultRequest, context: RequestContext, api: InferenceApi, name: str | None
) -> HttpReply:
    model = name or data.model or api.gateway.routes.root_model()
    operation, body = operation_of(data, model, api), msgspec.to_builtins(data)
    call = await operation.decode(body, model, context, api)
    served = await api.serve(context, call)
    encoded = operation.encode(body, served.reply)
    return respond(context, served, encoded, compute_headers(context, served.reply, call))


@endpoint(
    "/",
    reply=ANY_RESPONSE,
    description="Reply of the model's default operation",
)
async def default(
    data: DefaultRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Run the default operation of the model.

    An embedding model embeds `inputs`, a sparse model returns their weighted terms, a classifier their
    labels, and a reranker ranks `texts` by `query`. `inputs` with a source sentence and sentences always ask
    for similarity.
    """
    return await _serve(data, context, api, name)


@endpoint(
    "/invocations",
    reply=ANY_RESPONSE,
    description="Reply of the model's default operation",
    below_models=False,
)
async def invocations(
    data: DefaultRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Run the default operation of the model at the path that Amazon SageMaker calls.

    The body and the reply are those of `POST /`.
    """
    return await _serve(data, context, api, name)


class VertexRequest(msgspec.Struct):
    """Bodies of `POST /`, each of which gets one prediction."""

    instances: list[DefaultRequest]


class VertexResponse(msgspec.Struct):
    """The reply to each instance, in order."""

    predictions: list[Any]


class Instance(NamedTuple):
    """One body: its operation, its fields, and its call."""

    operation: DefaultOperation
    body: Any
    call: Call


async def decode_instance(data: DefaultRequest, context: RequestContext, api: InferenceApi) -> Instance:
    """Decode one instance. A body with `query` and `texts` is ranked, any other is never ranked.

    Raises: EmptyInput, InvalidInput, and the errors of `operation_of`.
    """
    model = data.model or api.gateway.routes.root_model()
    operation, body = operation_of(data, model, api), msgspec.to_builtins(data)
    if data.query is not UNSET and data.texts is not UNSET:
        operation = RERANK
    elif operation is RERANK:
        operation = PREDICT
    return Instance(operation, body, await operation.decode(body, model, context, api))


def options_of(instance: Instance) -> Any:
    """Return the key by which instances are grouped into one call; unique for one that is computed alone."""
    call = instance.call
    if isinstance(call.work, Embed | Encode | Classify):
        return replace(call, work=replace(call.work, inputs=()))
    return id(instance)


def groups_of(instances: list[Instance]) -> list[list[Instance]]:
    """Return the instances of each call. Raises: InvalidInput if there are too many calls."""
    groups = [list(group) for _, group in groupby(instances, options_of)]
    if len(groups) > CALLS_MAX:
        raise InvalidInput(
            f"the instances make {len(groups)} calls; at most {CALLS_MAX}: put those with the same options "
            "next to each other",
            param="instances",
        )
    return groups


def joined(instances: list[Instance]) -> Call:
    """Return the call for instances with the same options."""
    call = instances[0].call
    if len(instances) == 1:
        return call
    inputs = tuple(item for instance in instances for item in inputs_of(instance.call.work))
    return replace(call, work=replace(call.work, inputs=inputs))


def part_of(reply: Reply, start: int, stop: int) -> Reply:
    """Return the part of a reply that answers some of the inputs."""
    match reply:
        case EmbedReply():
            return replace(reply, vectors=reply.vectors[start:stop])
        case EncodeReply():
            return replace(reply, sparse=(reply.sparse or ())[start:stop])
        case ClassifyReply():
            return replace(reply, scores=reply.scores[start:stop])
    return reply


def encode_parts(instances: list[Instance], reply: Reply) -> list[bytes]:
    """Return the prediction of each instance of one call as JSON."""
    parts, start = [], 0
    for instance in instances:
        stop = start + len(inputs_of(instance.call.work))
        parts.append(instance.operation.encode(instance.body, part_of(reply, start, stop)))
        start = stop
    return parts


def truncated_in(truncated: list[tuple[int, ...] | None], inputs: list[int]) -> tuple[int, ...] | None:
    """Return the truncated inputs among those of all calls, None if one of the calls does not report them.

    truncated, inputs: the indices, and the number of inputs, of each call.
    """
    indices: list[int] = []
    for call, of_call in enumerate(truncated):
        if of_call is None:
            return None
        indices += [sum(inputs[:call]) + index for index in of_call]
    return tuple(indices)


@endpoint(
    "/vertex",
    reply=VertexResponse,
    description="A prediction for each instance",
    below_models=False,
)
async def vertex(
    data: VertexRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,  # noqa: ARG001 - not below /models
) -> HttpReply:
    """Run several bodies of `POST /` in the envelope of Google's Vertex AI.

    Returns a prediction for each instance, in order. Instances with the same options that follow each other
    are one call.
    """
    api.check_count(len(data.instances), "instances")
    instances = [await decode_instance(instance, context, api) for instance in data.instances]
    api.check_count(sum(len(inputs_of(instance.call.work)) for instance in instances), "instances")
    predictions: list[bytes] = []
    inputs: list[int] = []
    served: list[Served] = []
    for members in groups_of(instances):
        call = joined(members)
        served.append(await api.serve(context, call))
        inputs.append(len(inputs_of(call.work)))
        predictions += encode_parts(members, served[-1].reply)
    context.inputs, context.tokens = sum(inputs), sum(part.reply.tokens for part in served)
    truncated = truncated_in([part.reply.truncated for part in served], inputs)
    last = replace(served[-1], reply=replace(served[-1].reply, truncated=truncated))
    return respond(context, last, b'{"predictions":[' + b",".join(predictions) + b"]}")


HANDLERS = [default, invocations, vertex]
