"""Services that need no key: health and reflection.

Source: grpc.health.v1, and grpc.reflection.v1alpha, whose messages v1 repeats under another name.
"""

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from backends.tei_protos import tei_multiplexer_pb2, tei_pb2
from gateway.api.grpc.call_stream import OPEN_MESSAGE_BYTES_MAX
from gateway.api.grpc.rpc import Rpc
from gateway.errors import GatewayError, GatewayFull, MalformedBody, NotFound

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


def answer_health_unread(rpc: Rpc) -> None:
    """Report the same without reading the message: probes of the process itself ask for no service.

    Raises: GatewayFull, if the client takes no reply.
    """
    reply = _health_reply(rpc)
    if not rpc.stream.takes(reply):
        raise too_many_open()
    rpc.stream.begin({"x-request-id": rpc.context.request_id})
    rpc.stream.write_at_once(reply)


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
    leaving = rpc.parts.in_flight.leaving
    return health_pb2.HealthCheckResponse.NOT_SERVING if leaving else health_pb2.HealthCheckResponse.SERVING


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
