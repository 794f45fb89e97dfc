"""Answers to RPCs with their metadata: one message, streams, texts to rank, Arrow, health, reflection.

The multiplexer's messages carry a target, which decides the model. Sources: nazq/tei-manager 0.12.0, which
routes by the name of an instance only; grpc.health.v1; grpc.reflection.v1alpha, whose messages v1 repeats
under another name.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from backends.contract import Embed, EmbedReply, Encode, Operation, Output, TermWeights
from backends.tei_protos import tei_multiplexer_pb2, tei_pb2
from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from gateway.api.dialects.tei.info import describe_model
from gateway.api.grpc.call_stream import OPEN_MESSAGE_BYTES_MAX
from gateway.api.grpc.messages import OTHER_FIELDS_MAX, field, open_envelope, parse
from gateway.api.grpc.rpc import Message, Rpc
from gateway.api.grpc.tei import (
    RERANK,
    Method,
    encode_info,
    encode_metadata,
    join_rerank,
)
from gateway.api.server.inference_api import InferenceApi, joined_headers, reply_headers
from gateway.api.server.request import LEAST
from gateway.api.server.request_context import RequestContext
from gateway.api.server.several_calls import CallPart, serve_parts
from gateway.api.wire.arrow import Form, Rows, check_installed, read_in_turn, write_sparse, write_vectors
from gateway.api.wire.tei import compute_headers
from gateway.calls import Call, Work
from gateway.declared.host import InstanceInfo
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    GatewayFull,
    InvalidInput,
    MalformedBody,
    ModelNotFound,
    NoReplica,
    NotFound,
)
from gateway.serve import Served
from gateway.tenants.keyring import Tenant

SHOWN_CHARACTERS_MAX = 128
# How long the rest of a stream is read after a failure: its client may wait for a reply before it sends its
# next message.
DISCARD_S = 0.1
# Of one Arrow stream: a client of TEI Manager sends whole tables. Each `limits.inputs` of them are one call.
ROWS_MAX = 65_536
# Calls of one Arrow stream in flight.
PARALLEL = 2
# Of the vectors of one reply.
REPLY_BYTES_MAX = 128 * 1024 * 1024
NUMBER_BYTES = 4
# As TEI Manager's replies.
LZ4 = Form("lz4")

NO_TERMS = TermWeights(np.empty(0, np.int32), np.empty(0, np.float32))
SERVICES = tuple(
    service.full_name
    for file in (tei_pb2, tei_multiplexer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HEALTH = f"/{HEALTH_SERVICE}/Check"
REFLECTION = (
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
)
# Without a key, so many RPCs of all connections, and of one, wait for their client at once, and so long.
OPEN_RPCS_MAX = 16
OPEN_RPCS_OF_ONE_MAX = 4
OPEN_WAIT_S = 10.0
_REFLECTION = reflection.ReflectionServicer((*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME))

MakeWork = Callable[[tuple[str, ...]], Work]


def take_request(rpc: Rpc, message: bytes, name: str) -> bytes:
    """Return the request in a message, encoded, and note its target. name: of the request.

    Raises: InvalidInput, MalformedBody, ModelNotFound, NoReplica.
    """
    envelope = open_envelope(message, OTHER_FIELDS_MAX)
    take_target(rpc, envelope.target)
    if envelope.request is None:
        raise InvalidInput(f"Missing {name} request", param="request")
    return envelope.request


def take_target(rpc: Rpc, encoded: bytes | None) -> None:
    """Make the target's model that of the RPC. All messages of a stream have the target of the first.

    encoded: None if it is absent, as it may be after the first.
    Raises: InvalidInput, MalformedBody, ModelNotFound, NoReplica.
    """
    if rpc.target is None and encoded is None:
        raise InvalidInput("Missing target", param="target")
    if encoded is None:
        return
    if rpc.target is not None:
        if encoded != rpc.target:
            raise InvalidInput(
                "`target` differs between messages of one stream; open a stream for each", param="target"
            )
        return
    try:
        target = mux.Target.FromString(encoded)
    except DecodeError as error:
        raise MalformedBody("`target` is no valid protobuf Target") from error
    tenant = rpc.context.tenant
    routes = rpc.parts.api.gateway.routes
    rpc.aim(encoded, model_of(target, routes.names(tenant) if tenant else (), rpc.parts.api))


def model_of(target: mux.Target, names: Sequence[str], api: InferenceApi) -> str:
    """Return the public name of a target's model.

    names: models that the key may use, in the configuration's order.
    Raises: InvalidInput, ModelNotFound, NoReplica.
    """
    kind = target.WhichOneof("routing")
    if kind == "instance_name":
        return _by_name(target.instance_name, names, api)
    if kind == "model_id":
        return _by_model(target.model_id, names, api)
    if kind == "instance_index":
        return _by_index(target.instance_index, names, api)
    raise InvalidInput("Missing target", param="target")


def _by_name(name: str, names: Sequence[str], api: InferenceApi) -> str:
    if not name:
        raise InvalidInput("Instance name cannot be empty", param="target")
    if (instance := api.instances.by_name(name)) is not None:
        return _of_instance(instance, f"Instance '{name}'", names, api)
    if name not in api.gateway.routes.all_names():
        raise ModelNotFound(f"Instance '{name[:SHOWN_CHARACTERS_MAX]}' not found", param="target")
    return name


def _by_model(model_id: str, names: Sequence[str], api: InferenceApi) -> str:
    """Return the model with a public name, or else the first one of the only upstream that reports an id."""
    if model_id in names:
        return model_id
    routes = api.gateway.routes
    found: dict[str, str] = {}
    for name in names:
        upstream = routes.upstream_of(name)
        facts = api.gateway.view_of(name).capabilities
        if facts is not None and facts.model_id == model_id:
            found.setdefault(upstream, name)
    if len(found) > 1:
        # Servers of one id need not compute the same vectors.
        listed = ", ".join(repr(name) for name in list(found.values())[:8])
        raise InvalidInput(f"several models are {model_id!r}: {listed}; name one of them", param="target")
    if not found:
        raise ModelNotFound(f"Model '{model_id[:SHOWN_CHARACTERS_MAX]}' not found", param="target")
    return next(iter(found.values()))


def _by_index(index: int, names: Sequence[str], api: InferenceApi) -> str:
    """Return the model of an instance by the order of creation; without instances, of the key's models."""
    if (instance := api.instances.by_index(index)) is not None:
        return _of_instance(instance, f"Instance {index}", names, api)
    count = len(api.instances) or len(names)
    if index >= count:
        raise ModelNotFound(f"Instance {index} not found; there are {count}", param="target")
    return names[index]


def _of_instance(instance: InstanceInfo, shown: str, names: Sequence[str], api: InferenceApi) -> str:
    """Return a model that the upstream of an instance serves, one that the key may use if there is any.

    shown: the instance as the caller named it. names: models that the key may use.
    Raises: NoReplica, if no calls are sent to the instance now.
    """
    routes = api.gateway.routes
    settings = api.gateway.serving.config.models
    models = [name for name in routes.all_names() if instance.upstream in settings[name].upstream_names]
    if not instance.joined or not models:
        raise NoReplica(f"{shown} is {instance.status}, not running")
    models = [name for name in models if name in names] or models
    return instance.upstream if instance.upstream in models else models[0]


async def answer_info(rpc: Rpc, *, enveloped: bool = False) -> None:
    """Describe a model. enveloped: the message has a target."""
    api = rpc.parts.api
    tenant = api.authenticator.authenticate(rpc.context)
    with rpc.holding(await rpc.read_only()) as message:
        _read_target(rpc, message, enveloped=enveloped)
    described = encode_info(describe_model(api, tenant, rpc.context.model))
    await rpc.begin({})
    await rpc.write(described)


def _read_target(rpc: Rpc, message: bytes, *, enveloped: bool) -> None:
    if enveloped:
        take_target(rpc, open_envelope(message, OTHER_FIELDS_MAX).target)
    else:
        parse(pb.InfoRequest, message, OTHER_FIELDS_MAX)


async def answer_unary(rpc: Rpc, method: Method) -> None:
    """Answer one message. The key and the known limits are checked before it is read."""
    context, api = rpc.context, rpc.parts.api
    try:
        api.admit(context, method.least)
        with rpc.holding(await rpc.read_only()) as message:
            await _reply(rpc, method, parse_request(rpc, method, message))
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, method.least) from None


async def answer_rerank_stream(rpc: Rpc, *, enveloped: str | None = None) -> None:
    """Collect the texts of a stream, and answer once. enveloped: as in `Method`."""
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


async def _reply(rpc: Rpc, method: Method, request: Any) -> None:
    context = rpc.context
    call, served = await serve(rpc, method, request, context)
    message = encode(method, request, call, served, context)
    context.timeline.lap("encode")
    headers = reply_headers(served)
    if method.is_timed:
        headers |= compute_headers(context, served.reply, call)
    headers["server-timing"] = context.timeline.server_timing()
    await rpc.begin(headers)
    await rpc.write(message)


def parse_request(rpc: Rpc, method: Method, message: bytes) -> Any:
    """Return a decoded request. Raises: InvalidInput, MalformedBody, ModelNotFound."""
    if method.enveloped is not None:
        message = take_request(rpc, message, method.enveloped)
    fields_max = (method.fields_max or rpc.parts.api.inputs_max) + OTHER_FIELDS_MAX
    return parse(method.request, message, fields_max)


async def serve(rpc: Rpc, method: Method, request: Any, context: RequestContext) -> tuple[Call, Served]:
    """Run one request through the gateway's stages; return its call, and the `Served`.

    context: of its message. Raises: GatewayError.
    """
    api = rpc.parts.api
    call = await method.decode(method.body_of(request), rpc.context.model, context, api)
    return call, await api.serve(context, call)


def encode(method: Method, request: Any, call: Call, served: Served, context: RequestContext) -> bytes:
    """Return the reply to one message."""
    message = method.encode(request, served.reply)
    if method.is_timed:
        message += encode_metadata(context.timeline, served.reply, call)
    return message


async def answer_stream(rpc: Rpc, method: Method) -> None:
    """Answer each message; each is charged as one request. The first that fails ends the stream."""
    context, api = rpc.context, rpc.parts.api
    try:
        tenant = api.admit(context, method.least)
        await rpc.begin({})
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, method.least) from None
    try:
        await MessageStream(rpc, method, parallel_of(tenant, method)).run()
    except Exception:
        await rpc.discard_rest(DISCARD_S)
        raise


def parallel_of(tenant: Tenant, method: Method) -> int:
    """Return the most messages of a stream in flight, which `requests_in_flight` of the key may lower."""
    amounts = [limit.amount for limit in tenant.limits if limit.period == "in_flight"]
    return max(1, min(method.parallel, *amounts)) if amounts else method.parallel


class MessageStream:
    """Messages of one stream in flight. parallel: most of them. Their bytes are bounded as one body is.

    Rule: the reader waits for room, so that the flow control of the connection slows down a client that sends
    faster than the model computes.
    """

    def __init__(self, rpc: Rpc, method: Method, parallel: int) -> None:
        self._rpc = rpc
        self._method = method
        self._parallel = parallel
        self._bytes = 0
        self._written = 0
        self._tasks: deque[asyncio.Task[bytes]] = deque()
        # Set when a task was added or removed, or the reader has ended.
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Read and answer until the client has sent its last message. Raises: the first failure."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            while self._tasks or not reading.done():
                if self._tasks:
                    await self._rpc.write(await self._next())
                    self._tasks.popleft()
                    self._written += 1
                    self._changed.set()
                else:
                    await self._wait()
            await reading
        finally:
            await _cancel(reading, *self._tasks)

    async def _next(self) -> bytes:
        """Return the reply to the oldest message in flight. Raises: its failure; the RPC notes its number."""
        try:
            return await self._tasks[0]
        except Exception:
            self._rpc.note_failed_message(self._written)
            raise

    async def _read(self) -> None:
        while (message := await self._rpc.read()) is not None:
            self._bytes += len(message.content)
            self._tasks.append(asyncio.create_task(self._answer(message)))
            self._changed.set()
            while len(self._tasks) >= self._parallel or self._bytes > self._rpc.parts.body_bytes_max:
                await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _answer(self, message: Message) -> bytes:
        """Return the reply to one message. Raises: GatewayError."""
        context, method, api = self._rpc.context.part(), self._method, self._rpc.parts.api
        size = len(message.content)
        try:
            with self._rpc.holding(message) as content:
                request = parse_request(self._rpc, method, content)
            call, served = await serve(self._rpc, method, request, context)
            self._rpc.context.add(context)
            return encode(method, request, call, served, context)
        except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
            raise await api.charge_failure(context, error, method.least) from None
        finally:
            self._bytes -= size
            self._changed.set()


async def _cancel(*tasks: "asyncio.Task[object]") -> None:
    """Cancel tasks and wait for their end. Errors of messages after the first failure are dropped."""
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


async def answer_embed_arrow(rpc: Rpc) -> None:
    """Embed the texts of a stream."""
    await _answer(rpc, mux.EmbedArrowRequest)


async def answer_sparse_arrow(rpc: Rpc) -> None:
    """Return the term weights of the texts of a stream."""
    await _answer(rpc, mux.EmbedSparseArrowRequest)


async def _answer(rpc: Rpc, kind: type[Any]) -> None:
    context, api = rpc.context, rpc.parts.api
    try:
        api.admit(context, LEAST)
        check_installed()
        with rpc.holding(await rpc.read_only()) as message:
            request = parse(kind, message, OTHER_FIELDS_MAX)
            take_target(rpc, request.target.SerializeToString() if request.HasField("target") else None)
            assert context.tenant is not None
            rows, texts = await read_in_turn(
                api.arrow_threads,
                context.tenant,
                request.arrow_ipc,
                ROWS_MAX,
                rpc.parts.body_bytes_max,
                first_column=True,
            )
            stream, headers = await _served(rpc, request, rows, texts)
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, LEAST) from None
    headers["server-timing"] = context.timeline.server_timing()
    await rpc.begin(headers)
    await rpc.write(field(1, bytes(stream)))


async def _served(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str]
) -> tuple[memoryview, dict[str, str]]:
    """Return the reply to the texts of a stream, and its metadata. Raises: GatewayError."""
    is_sparse = isinstance(request, mux.EmbedSparseArrowRequest)
    operation = Operation.ENCODE if is_sparse else Operation.EMBED
    api, tenant = rpc.parts.api, rpc.context.tenant
    assert tenant is not None
    # Before the width of its vectors is of use: the key may not use the model.
    tenant.require_operation(operation)
    api.gateway.routes.resolve(tenant, rpc.context.model, operation)
    if not request.noop and texts:
        if not is_sparse:
            _check_reply(len(texts), _width(rpc))
        return await _computed(rpc, request, rows, texts)
    width = None if is_sparse else _width(rpc)
    if is_sparse or width is not None:
        # One request without tokens.
        await api.gateway.charges.charge_bad_request(tenant)
    if is_sparse:
        return await asyncio.to_thread(write_sparse, [NO_TERMS] * len(texts), rows, LZ4), {}
    width = width or await _measured_width(rpc)
    _check_reply(len(texts), width)
    zeros = np.zeros((len(texts), width), np.float32)
    return await asyncio.to_thread(write_vectors, zeros, rows, LZ4), {}


def _width(rpc: Rpc) -> int | None:
    """Return the length of the model's vectors, None while it is not known."""
    capabilities = rpc.parts.api.capabilities_of(rpc.context.model, Operation.EMBED, rpc.context.tenant)
    return None if capabilities is None else capabilities.dimensions


async def _measured_width(rpc: Rpc) -> int:
    """Return the length of a vector of a server that does not report it: TEI. Raises: GatewayError."""
    served = await rpc.parts.api.serve(rpc.context, Call(Embed(("a",)), rpc.context.model))
    assert isinstance(served.reply, EmbedReply)
    return int(served.reply.vectors.shape[1])


def _check_reply(count: int, width: int | None) -> None:
    """Check the size of a reply before it is computed. Raises: InvalidInput."""
    most = REPLY_BYTES_MAX // (NUMBER_BYTES * (width or 1))
    if count > most:
        raise InvalidInput(f"{count} vectors of {width} numbers; send at most {most} texts in one stream")


async def _computed(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str]
) -> tuple[memoryview, dict[str, str]]:
    if isinstance(request, mux.EmbedSparseArrowRequest):
        replies, headers = await _serve_all(rpc, request, rows, texts, _sparse_work)
        terms = [weights for served in replies for weights in served.reply.sparse]
        return await asyncio.to_thread(write_sparse, terms, rows, LZ4), headers
    work = partial(_dense_work, normalize=request.normalize)
    replies, headers = await _serve_all(rpc, request, rows, texts, work)
    parts = [served.reply.vectors for served in replies]
    vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return await asyncio.to_thread(write_vectors, vectors, rows, LZ4), headers


def _dense_work(texts: tuple[str, ...], *, normalize: bool) -> Embed:
    return Embed(texts, normalize=normalize)


def _sparse_work(texts: tuple[str, ...]) -> Encode:
    return Encode(texts, frozenset({Output.SPARSE}))


async def _serve_all(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str], make_work: MakeWork
) -> tuple[list[Any], dict[str, str]]:
    """Return what each call served, in order, and the metadata of them all.

    Raises: GatewayError of the first call that fails; its message names the row.
    """
    size, cuts = rpc.parts.api.inputs_max, bool(request.truncate)
    parts = [
        CallPart(
            Call(make_work(tuple(texts[start : start + size])), rpc.context.model, cuts),
            rows.texts[start : start + size],
        )
        for start in range(0, len(texts), size)
    ]
    found = await serve_parts(
        rpc.parts.api, rpc.context, parts, PARALLEL, lambda error, part: error.name_rows(part.rows)
    )
    return found, joined_headers([(served, part.rows) for served, part in zip(found, parts, strict=True)])


async def answer_health(rpc: Rpc) -> None:
    """Report whether the model, or the one of root paths, has a usable replica."""
    content = await _read(rpc)
    if content is None:
        raise MalformedBody("the RPC has no message; a unary RPC has one")
    try:
        request = health_pb2.HealthCheckRequest.FromString(content)
    except DecodeError:
        raise MalformedBody("the message is no valid protobuf HealthCheckRequest") from None
    if request.service not in ("", HEALTH_SERVICE, *SERVICES):
        raise NotFound("service not registered")
    await rpc.begin({})
    await rpc.write(_health_reply(rpc), OPEN_WAIT_S)


def answer_health_unread(rpc: Rpc) -> GatewayFull | None:
    """Report the same without reading the message: probes of the process itself ask for no service.

    Return the error that ends the RPC if its client takes no reply.
    """
    reply = _health_reply(rpc)
    if not rpc.stream.takes(reply):
        return too_many_open()
    rpc.stream.begin({"x-request-id": rpc.context.request_id})
    rpc.stream.write_at_once(reply)
    return None


def too_many_open() -> GatewayFull:
    """Return the error of an RPC without a key, while many wait for their clients."""
    return GatewayFull("many calls without a key are open; try again later")


def _health_reply(rpc: Rpc) -> bytes:
    reply: bytes = health_pb2.HealthCheckResponse(status=_health_of(rpc)).SerializeToString()
    return reply


async def _read(rpc: Rpc) -> bytes | None:
    """Return the next message, None at the end of them. Raises: the errors of `Rpc.read`."""
    message = await rpc.read(OPEN_WAIT_S, OPEN_MESSAGE_BYTES_MAX)
    if message is None:
        return None
    with rpc.holding(message) as content:
        return content


def _health_of(rpc: Rpc) -> health_pb2.HealthCheckResponse.ServingStatus:
    try:
        rpc.parts.api.check_health(rpc.context.model)
    except GatewayError:
        return health_pb2.HealthCheckResponse.NOT_SERVING
    departs = bool(rpc.parts.in_flight.departure)
    return health_pb2.HealthCheckResponse.NOT_SERVING if departs else health_pb2.HealthCheckResponse.SERVING


async def answer_reflection(rpc: Rpc) -> None:
    """Answer each question about the services and their messages. Raises: MalformedBody, DeadlineExceeded."""
    await rpc.begin({})
    while (content := await _read(rpc)) is not None:
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(content)
        except DecodeError:
            raise MalformedBody("the message is no valid protobuf ServerReflectionRequest") from None
        for reply in _REFLECTION.ServerReflectionInfo(iter((request,)), None):
            await rpc.write(reply.SerializeToString(), OPEN_WAIT_S)
