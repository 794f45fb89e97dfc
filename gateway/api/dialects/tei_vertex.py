"""Text Embeddings Inference: POST /vertex, the envelope of Google's Vertex AI around several bodies.

Instances with the same options are computed together. Source: huggingface/text-embeddings-inference 1.9.3,
router/src/http/server.rs.
"""

from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from msgspec import UNSET
from msgspec.structs import replace

from backends.contract import Classify, ClassifyReply, Embed, EmbedReply, Encode, EncodeReply, Reply
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tei_operations import (
    PREDICT,
    RERANK,
    DefaultOperation,
    DefaultRequest,
    operation_of,
)
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.serve import Served

# Calls run one after the other, each with a deadline of its own.
CALLS_MAX = 32


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


def encode_parts(instances: list[Instance], reply: Reply) -> list[bytes]:
    """Return the prediction of each instance of one call as JSON."""
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


@inference(
    "/vertex",
    dialect=TEI,
    reply=ResponseSpec(VertexResponse, description="A prediction for each instance"),
    tags=["TEI"],
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
    api.check_count(sum(len(instance.call.work.inputs) for instance in instances), "instances")
    predictions: list[bytes] = []
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
    return respond(context, last, b'{"predictions":[' + b",".join(predictions) + b"]}")


HANDLERS = [vertex]
