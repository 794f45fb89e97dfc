"""Answers to TEI's RPCs that have one reply: Info, one message, RerankStream."""

from typing import Any

from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc.messages import OTHER_FIELDS_MAX, open_envelope, parse
from gateway.api.grpc.rpc import Rpc
from gateway.api.grpc.targets import take_request, take_target
from gateway.api.grpc.tei import (
    RERANK,
    Operation,
    encode_info,
    encode_metadata,
    join_rerank,
)
from gateway.api.server.call_context import CallContext
from gateway.api.wire.least_costs import LEAST
from gateway.api.wire.tei import compute_headers
from gateway.calls import Call
from gateway.errors import BodyTooLarge, InvalidInput


async def answer_info(rpc: Rpc, *, enveloped: bool = False) -> None:
    """Describe a model. enveloped: the message has a target."""
    api = rpc.parts.api
    tenant = api.authenticator.authenticate(rpc.context)
    with rpc.holding(await rpc.read_only()) as message:
        _read_target(rpc, message, enveloped=enveloped)
    described = encode_info(rpc.parts.describe_model(api, tenant, rpc.context.model))
    await rpc.begin({})
    await rpc.write(described)


def _read_target(rpc: Rpc, message: bytes, *, enveloped: bool) -> None:
    if enveloped:
        take_target(rpc, open_envelope(message, OTHER_FIELDS_MAX).target)
    else:
        parse(pb.InfoRequest, message, OTHER_FIELDS_MAX)


async def answer_unary(rpc: Rpc, operation: Operation) -> None:
    """Answer one message. The key and the known limits are checked before it is read."""
    context, api = rpc.context, rpc.parts.api
    try:
        api.admit(context, operation.least)
        with rpc.holding(await rpc.read_only()) as message:
            await _reply(rpc, operation, parse_request(rpc, operation, message))
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, operation.least) from None


async def answer_rerank_stream(rpc: Rpc, *, enveloped: str | None = None) -> None:
    """Collect the texts of a stream, and answer once. enveloped: as in `Operation`."""
    context, api = rpc.context, rpc.parts.api
    try:
        api.admit(context, LEAST)
        await _reply(rpc, RERANK, join_rerank(await _collect(rpc, enveloped)))
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        failure = await api.charge_failure(context, error, LEAST)
        # grpc's Python client loses a status without metadata before it, or while it is still sending.
        await rpc.begin({})
        if context.tenant is not None:
            await rpc.discard_rest()
        raise failure from None


async def _collect(rpc: Rpc, enveloped: str | None) -> list[pb.RerankStreamRequest]:
    """Return all messages, each of which is counted as held until the RPC ends.

    Raises: BodyTooLarge, GatewayFull, InvalidInput, and the errors of `Rpc.read` and `parse`.
    """
    requests: list[pb.RerankStreamRequest] = []
    size, inputs_max = 0, rpc.parts.api.inputs_max
    while (read := await rpc.read()) is not None:
        message = read.content
        size += len(message)
        if size > rpc.parts.body_bytes_max:
            raise BodyTooLarge(f"the messages are larger than {rpc.parts.body_bytes_max} bytes together")
        if len(requests) == inputs_max:
            raise InvalidInput(f"more than {inputs_max} texts; this gateway takes no more in a call")
        if enveloped is not None:
            message = take_request(rpc, message, enveloped)
        requests.append(parse(pb.RerankStreamRequest, message, OTHER_FIELDS_MAX))
    return requests


async def _reply(rpc: Rpc, operation: Operation, request: Any) -> None:
    context = rpc.context
    call, served = await serve(rpc, operation, request, context)
    message = encode(operation, request, call, served, context)
    context.timeline.lap("encode")
    headers = rpc.parts.reply_headers(served)
    if operation.is_timed:
        headers |= compute_headers(context, served.reply, call)
    headers["server-timing"] = context.timeline.server_timing()
    await rpc.begin(headers)
    await rpc.write(message)


def parse_request(rpc: Rpc, operation: Operation, message: bytes) -> Any:
    """Return a decoded request. Raises: InvalidInput, MalformedBody, ModelNotFound."""
    if operation.enveloped is not None:
        message = take_request(rpc, message, operation.enveloped)
    fields_max = (operation.fields_max or rpc.parts.api.inputs_max) + OTHER_FIELDS_MAX
    return parse(operation.request, message, fields_max)


async def serve(rpc: Rpc, operation: Operation, request: Any, context: CallContext) -> tuple[Call, Any]:
    """Run one request through the gateway's stages; return its call, and the `Served`.

    context: of its message. Raises: GatewayError.
    """
    api = rpc.parts.api
    call = await operation.decode(request, rpc.context.model, context, api)
    return call, await api.serve(context, call)


def encode(operation: Operation, request: Any, call: Call, served: Any, context: CallContext) -> bytes:
    """Return the reply to one message."""
    message = operation.encode(request, served.reply)
    if operation.is_timed:
        message += encode_metadata(context.timeline, served.reply, call)
    return message
