"""TEI's operations, and the paths whose body does not say which one: /, /invocations and /vertex.

An operation has a body, its decoder, and the encoders of its reply. In the envelope of Google's Vertex AI are
several bodies, of which those with the same options are computed together.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, TypeAlias

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
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import BELOW_MODEL, NAME
from gateway.api.server.request import Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.arrow import write_sparse, write_vectors
from gateway.api.wire.arrow_http import arrow_stream, facts_of, wants_arrow
from gateway.api.wire.inputs import Dimensions, PromptName
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
    decode_token_vectors,
    is_batch,
    predictions_of,
    rank_items,
    term_lists,
)
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.serve import Served

# Body, model, context, api → the call.
Decode: TypeAlias = Callable[[Any, str | None, RequestContext, InferenceApi], Awaitable[Call]]
# Context, reply, metadata of the schema → the Arrow stream, and its media type.
EncodeArrow: TypeAlias = Callable[[RequestContext, Any, Mapping[str, str]], Awaitable[tuple[memoryview, str]]]


class TeiOperation(NamedTuple):
    """One operation.

    kind: of its reply. encode: returns the reply to a body as `encode_json` takes it. arrow: as an Arrow
    stream, None for JSON only.
    """

    body: type[Any]
    decode: Decode
    kind: Any
    encode: Callable[[Any, Any], Any]
    arrow: EncodeArrow | None = None


def _predictions(body: PredictRequest, reply: Reply) -> Any:
    """Return the labels of each input; without a batch, those of the only input."""
    predictions = predictions_of(reply)
    return predictions if is_batch(body.inputs) else next(iter(predictions))


EMBED = TeiOperation(
    EmbedRequest,
    decode_embed,
    EmbedReply,
    lambda _, reply: reply.vectors,
    lambda context, reply, facts: arrow_stream(context, write_vectors, reply.vectors, facts),
)
EMBED_SPARSE = TeiOperation(
    TeiEncodeRequest,
    decode_sparse,
    EncodeReply,
    lambda _, reply: term_lists(reply.sparse or ()),
    lambda context, reply, facts: arrow_stream(context, write_sparse, reply.sparse or (), facts),
)
EMBED_ALL = TeiOperation(
    TeiEncodeRequest,
    decode_token_vectors,
    EncodeReply,
    lambda _, reply: reply.token_vectors or (),
)
SIMILARITY = TeiOperation(SimilarityRequest, decode_similarity, RerankReply, lambda _, reply: reply.scores)
PREDICT = TeiOperation(PredictRequest, decode_predict, ClassifyReply | RerankReply, _predictions)
RERANK = TeiOperation(
    TeiRerankRequest,
    decode_rerank,
    RerankReply,
    lambda body, reply: rank_items(reply, body.texts if body.return_text else None),
)


async def answer(request: Request[Any], operation: TeiOperation, model: str | None) -> HttpReply:
    """Serve a body of an operation. Raises: GatewayError."""
    context, body = request.context, request.body
    # A body with nulls is refused before it costs anything.
    as_arrow = operation.arrow is not None and wants_arrow(context)
    call = await operation.decode(body, model, context, request.api)
    served, reply = await request.serve(call, operation.kind)
    if as_arrow and operation.arrow is not None:
        facts = facts_of(served.route.model, reply.tokens)
        stream, media_type = await operation.arrow(context, reply, facts)
        return request.reply_bytes(served, stream, compute_headers(context, reply, call), media_type)
    value = operation.encode(body, reply)
    return await request.reply(served, value, compute_headers(context, reply, call))


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


class DefaultRequest(msgspec.Struct, omit_defaults=True):
    """The body of any of the operations: `inputs`, or for a reranker `query` and `texts`.

    A source sentence with sentences can only ask for similarity, whatever the model's default operation.
    """

    inputs: str | list[str | Integer | list[str | Integer]] | SimilarityInputs | UnsetType = UNSET
    query: str | UnsetType = UNSET
    texts: list[str] | UnsetType = UNSET
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None
    raw_scores: bool = False
    return_text: bool = False
    parameters: dict[str, Any] | None = None
    model: ModelName | None = None


def default_of(operations: frozenset[Operation], outputs: frozenset[Output]) -> TeiOperation:
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


def operation_of(
    data: DefaultRequest, model: str, context: RequestContext, api: InferenceApi
) -> TeiOperation:
    """Return the operation of a body: the model's default, or similarity.

    Raises: the errors of `InferenceApi.capabilities_of`.
    """
    capabilities = api.capabilities_of(model, Operation.EMBED, context.tenant)
    if isinstance(data.inputs, SimilarityInputs):
        return SIMILARITY
    return default_of(capabilities.operations, capabilities.outputs) if capabilities else EMBED


def body_of(data: DefaultRequest, operation: TeiOperation) -> Any:
    """Return the body of an operation. Raises: msgspec.ValidationError."""
    return msgspec.convert(msgspec.to_builtins(data), operation.body)


async def _serve(request: Request[DefaultRequest]) -> HttpReply:
    data, api = request.body, request.api
    model = request.model or api.gateway.routes.root_model(request.context.tenant)
    operation = operation_of(data, model, request.context, api)
    return await answer(Request(body_of(data, operation), request.context, api), operation, model)


@endpoint("/", reply=ANY_RESPONSE, description="Reply of the model's default operation")
async def default(request: Request[DefaultRequest]) -> HttpReply:
    """Run the default operation of the model.

    An embedding model embeds `inputs`, a sparse model returns their weighted terms, a classifier their
    labels, and a reranker ranks `texts` by `query`. `inputs` with a source sentence and sentences always ask
    for similarity.
    """
    return await _serve(request)


@endpoint(
    "/invocations",
    f"{BELOW_MODEL}/invocations",
    f"/endpoints/{NAME}/invocations",
    reply=ANY_RESPONSE,
    description="Reply of the model's default operation",
    below_models=False,
)
async def invocations(request: Request[DefaultRequest]) -> HttpReply:
    """Run the default operation of the model at the path that Amazon SageMaker calls, or that its clients do.

    A client's endpoint is the name of a model. The body and the reply are those of `POST /`.
    """
    return await _serve(request)


class VertexRequest(msgspec.Struct):
    """Bodies of `POST /`, each of which gets one prediction. Google's clients add fields of its envelope."""

    takes_other_fields: ClassVar[bool] = True
    instances: list[DefaultRequest]


class VertexResponse(msgspec.Struct):
    """The reply to each instance, in order."""

    predictions: list[Any]


class Instance(NamedTuple):
    """One body: its operation, its fields, and its call."""

    operation: TeiOperation
    body: Any
    call: Call


async def decode_instance(data: DefaultRequest, context: RequestContext, api: InferenceApi) -> Instance:
    """Decode one instance. A body with `query` and `texts` is ranked, any other is never ranked.

    Raises: EmptyInput, InvalidInput, and the errors of `operation_of`.
    """
    model = data.model or api.gateway.routes.root_model(context.tenant)
    operation = operation_of(data, model, context, api)
    if data.query is not UNSET and data.texts is not UNSET:
        operation = RERANK
    elif operation is RERANK:
        operation = PREDICT
    body = body_of(data, operation)
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
    inputs = tuple(item for instance in instances for item in instance.call.work.inputs)
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


def encode_parts(instances: list[Instance], reply: Reply) -> list[Any]:
    """Return the prediction of each instance of one call."""
    parts, start = [], 0
    for instance in instances:
        stop = start + len(instance.call.work.inputs)
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


@endpoint("/vertex", reply=VertexResponse, description="A prediction for each instance", below_models=False)
async def vertex(request: Request[VertexRequest]) -> HttpReply:
    """Run several bodies of `POST /` in the envelope of Google's Vertex AI.

    Returns a prediction for each instance, in order. Instances with the same options that follow each other
    are one call.
    """
    context, api, bodies = request.context, request.api, request.body.instances
    api.check_count(len(bodies), "instances")
    instances = [await decode_instance(body, context, api) for body in bodies]
    api.check_count(sum(len(instance.call.work.inputs) for instance in instances), "instances")
    predictions: list[Any] = []
    inputs: list[int] = []
    served: list[Served] = []
    for members in groups_of(instances):
        call = joined(members)
        served.append(await api.serve(context, call))
        inputs.append(len(call.work.inputs))
        predictions += encode_parts(members, served[-1].reply)
    context.inputs, context.tokens = sum(inputs), sum(part.reply.tokens for part in served)
    truncated = truncated_in([part.reply.truncated for part in served], inputs)
    last = replace(served[-1], reply=replace(served[-1].reply, truncated=truncated))
    return await request.reply(last, {"predictions": predictions})


HANDLERS = [default, invocations, vertex]
