"""Services that need no key: health and reflection.

Source: grpc.health.v1, and grpc.reflection.v1alpha, whose messages v1 repeats under another name.
"""

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from backends.tei_protos import tei_multiplexer_pb2, tei_pb2
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
# Without a key, so many RPCs wait for a message at once, and so long.
OPEN_RPCS_MAX = 16
OPEN_READ_S = 10.0
_REFLECTION = reflection.ReflectionServicer((*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME))


async def answer_health(rpc: Rpc) -> None:
    """Report whether the model, or the one of root paths, has a usable replica.

    While many wait, the question is not read: probes of the process itself ask none.
    """
    if rpc.parts.open_rpcs.waiting >= OPEN_RPCS_MAX:
        await _write_health(rpc)
        return
    with rpc.parts.open_rpcs.entered():
        content = await rpc.read_only(OPEN_READ_S)
    try:
        request = health_pb2.HealthCheckRequest.FromString(content)
    except DecodeError:
        raise MalformedBody("the message is no valid protobuf HealthCheckRequest") from None
    if request.service not in ("", HEALTH_SERVICE, *SERVICES):
        raise NotFound("service not registered")
    await _write_health(rpc)


async def _write_health(rpc: Rpc) -> None:
    await rpc.begin({})
    await rpc.write(health_pb2.HealthCheckResponse(status=_health_of(rpc)).SerializeToString())


def _health_of(rpc: Rpc) -> health_pb2.HealthCheckResponse.ServingStatus:
    try:
        rpc.parts.api.check_health(rpc.context.model)
    except GatewayError:
        return health_pb2.HealthCheckResponse.NOT_SERVING
    leaving = rpc.parts.in_flight.leaving
    return health_pb2.HealthCheckResponse.NOT_SERVING if leaving else health_pb2.HealthCheckResponse.SERVING


async def answer_reflection(rpc: Rpc) -> None:
    """Answer each question about the services and their messages. Raises: GatewayFull while many wait."""
    if rpc.parts.open_rpcs.waiting >= OPEN_RPCS_MAX:
        raise GatewayFull("many calls without a key are open; try again later")
    await rpc.begin({})
    with rpc.parts.open_rpcs.entered():
        await _answer_questions(rpc)


async def _answer_questions(rpc: Rpc) -> None:
    """Answer until the caller has no more questions. Raises: MalformedBody, DeadlineExceeded."""
    while (content := await rpc.read(OPEN_READ_S)) is not None:
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(content)
        except DecodeError:
            raise MalformedBody("the message is no valid protobuf ServerReflectionRequest") from None
        for reply in _REFLECTION.ServerReflectionInfo(iter((request,)), None):
            await rpc.write(reply.SerializeToString())
