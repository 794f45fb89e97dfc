"""Operator endpoints for instances, in TEI Manager's shapes: below /admin, and on `manager.listen`.

The parent process runs the instances; these endpoints send it requests. API keys need the scope admin.
"""

import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.dialects.manager.dialect import MANAGER
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import document_errors
from gateway.api.server.paths import route_options
from gateway.api.server.responses import NO_KEY
from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InstanceInvalid,
    InstanceNotFound,
    InstanceRunning,
    InstancesUnavailable,
    NotFound,
)
from gateway.instances.records import (
    Act,
    Command,
    Create,
    CreateInstance,
    InstanceInfo,
    ListInstances,
    LogSlice,
    Position,
    ReadLog,
    Result,
    timestamp,
)

OPERATED = route_options(errors=MANAGER, for_operators=True, needs_admin=True)
OPEN = route_options(errors=MANAGER, for_operators=True, is_probe=True)
FAILURES = document_errors(MANAGER)
TAGS = ["Instances"]
# The problem's kind → error of the reply.
ERRORS: dict[str, type[GatewayError]] = {
    "VALIDATION_ERROR": InstanceInvalid,
    "INSTANCE_NOT_FOUND": InstanceNotFound,
    "ALREADY_RUNNING": InstanceRunning,
    "UNAVAILABLE": InstancesUnavailable,
}
EXPOSITION = ResponseSpec(
    str, generate_examples=False, description="Prometheus' text format", media_type="text/plain"
)
# Asks the parent process to carry out a request. Raises: TimeoutError.
AskParent = Callable[[Command], Awaitable[Result]]


class ManagerHealth(msgspec.Struct):
    """Health of the API for instances. timestamp: RFC 3339, in UTC."""

    status: str
    timestamp: str


class InstancesApi:
    """Requests about instances. ask: None if this gateway has no `manager`."""

    def __init__(self, ask: AskParent | None) -> None:
        self._ask = ask

    async def run(self, command: Command) -> Result:
        """Return the result of a request. Raises: GatewayError."""
        if self._ask is None:
            raise NotFound("this gateway has no instances; `manager.listen` in router.yaml adds them")
        try:
            result = await self._ask(command)
        except TimeoutError as error:
            message = "the request takes long and continues in the background; ask for the instance's status"
            raise DeadlineExceeded(message) from error
        if result.problem is not None:
            raise ERRORS[result.problem.kind](result.problem.message)
        return result

    async def act(self, command: Act | Create) -> InstanceInfo:
        """Return the instance that a request was about. Raises: GatewayError."""
        return (await self.run(command)).instances[0]


@get("/admin/instances", responses=FAILURES, tags=TAGS, opt=OPERATED)
async def list_instances(instances: NamedDependency[InstancesApi]) -> list[InstanceInfo]:
    """List the instances of this host, in order of creation."""
    return list((await instances.run(ListInstances())).instances)


@post(
    "/admin/instances",
    dto=OnePass[CreateInstance],
    return_dto=None,
    status_code=201,
    responses=FAILURES,
    tags=TAGS,
    opt=OPERATED,
)
async def create_instance(
    data: JSONBody[CreateInstance], instances: NamedDependency[InstancesApi]
) -> InstanceInfo:
    """Create an instance and start it.

    It is sent calls once it is ready.
    """
    return await instances.act(Create(data))


@get("/admin/instances/{name:str}", responses=FAILURES, tags=TAGS, opt=OPERATED)
async def get_instance(instances: NamedDependency[InstancesApi], name: FromPath[str]) -> InstanceInfo:
    """Describe an instance."""
    return await instances.act(Act(name, "get"))


@delete("/admin/instances/{name:str}", status_code=204, responses=FAILURES, tags=TAGS, opt=OPERATED)
async def delete_instance(instances: NamedDependency[InstancesApi], name: FromPath[str]) -> None:
    """Stop an instance and delete it.

    Calls in flight finish.
    """
    await instances.run(Act(name, "delete"))


@post("/admin/instances/{name:str}/start", status_code=200, responses=FAILURES, tags=TAGS, opt=OPERATED)
async def start_instance(instances: NamedDependency[InstancesApi], name: FromPath[str]) -> InstanceInfo:
    """Start an instance that is stopped or has failed."""
    return await instances.act(Act(name, "start"))


@post("/admin/instances/{name:str}/stop", status_code=200, responses=FAILURES, tags=TAGS, opt=OPERATED)
async def stop_instance(instances: NamedDependency[InstancesApi], name: FromPath[str]) -> InstanceInfo:
    """Stop an instance.

    Calls in flight finish. A stopped instance stays as it is.
    """
    return await instances.act(Act(name, "stop"))


@post("/admin/instances/{name:str}/restart", status_code=200, responses=FAILURES, tags=TAGS, opt=OPERATED)
async def restart_instance(instances: NamedDependency[InstancesApi], name: FromPath[str]) -> InstanceInfo:
    """Stop an instance and start it again."""
    return await instances.act(Act(name, "restart"))


@get("/admin/instances/{name:str}/logs", responses=FAILURES, tags=TAGS, opt=OPERATED)
async def get_log(
    instances: NamedDependency[InstancesApi],
    name: FromPath[str],
    start: FromQuery[Position | None] = None,
    end: FromQuery[Position | None] = None,
) -> LogSlice:
    """Return lines of an instance's log, of which the last 1,000 are kept.

    `start` and `end` mean what they mean in a slice of Python's; negative numbers count from the end.
    """
    log = (await instances.run(ReadLog(name, start, end))).log
    assert log is not None
    return log


@get("/admin/manager/health", responses=FAILURES, tags=TAGS, opt=OPEN, security=NO_KEY)
async def manager_health() -> ManagerHealth:
    """Answer while the API for instances responds; `/health` on `manager.listen`."""
    return ManagerHealth("healthy", timestamp(time.time()))


@get(
    "/admin/manager/metrics",
    responses={200: EXPOSITION} | FAILURES,
    tags=TAGS,
    opt=OPEN,
    security=NO_KEY,
)
async def manager_metrics(instances: NamedDependency[InstancesApi]) -> Response[bytes]:
    """Return counts of instances under TEI Manager's names; `/metrics` on `manager.listen`."""
    result = await instances.run(ListInstances())
    body = "".join(f"{line}\n" for line in _metric_lines(result))
    return Response(body.encode(), media_type="text/plain; version=0.0.4")


def _metric_lines(result: Result) -> Iterator[str]:
    for name, kind, value in (
        ("instances_count", "gauge", len(result.instances)),
        ("instances_created_total", "counter", result.created),
        ("instances_deleted_total", "counter", result.deleted),
        ("health_check_failures_total", "counter", sum(i.health_check_failures for i in result.instances)),
    ):
        yield f"# TYPE tei_manager_{name} {kind}"
        yield f"tei_manager_{name} {value}"
    yield "# TYPE tei_manager_instance_restarts_total counter"
    for instance in result.instances:
        # A name has no character that would have to be escaped.
        yield f'tei_manager_instance_restarts_total{{instance="{instance.name}"}} {instance.restarts}'


HANDLERS = [
    list_instances,
    create_instance,
    get_instance,
    delete_instance,
    start_instance,
    stop_instance,
    restart_instance,
    get_log,
    manager_health,
    manager_metrics,
]
