"""Operator endpoints for instances and models of this host, in TEI Manager's shapes.

They are served below /admin, and on `manager.listen`. The parent process runs the instances, downloads and
loads; these endpoints send it requests. API keys need the scope admin.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.dialects.manager.dialect import MANAGER
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import document_errors
from gateway.api.server.paths import model_name, route_options
from gateway.api.server.responses import NO_KEY
from gateway.audit.records import GATEWAY, Actor
from gateway.declared.host import (
    Act,
    ActOnModel,
    AddModel,
    Create,
    CreateInstance,
    HostCommand,
    HostResult,
    InstanceInfo,
    ListInstances,
    ListModels,
    LogSlice,
    ModelInfo,
    Position,
    ReadLog,
    timestamp,
)
from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InstanceInvalid,
    InstanceNotFound,
    InstanceRunning,
    InstancesUnavailable,
    ModelDownloadFailed,
    ModelLoadFailed,
    ModelNotFound,
    NotFound,
)

OPERATED = route_options(errors=MANAGER, for_operators=True, needs_admin=True)
NAMED = route_options(errors=MANAGER, for_operators=True, needs_admin=True, name_has_slashes=True)
OPEN = route_options(errors=MANAGER, for_operators=True, is_probe=True)
FAILURES = document_errors(MANAGER)
TAGS = ["Instances"]
# Kind of a refusal → error of the reply.
ERRORS: dict[str, type[GatewayError]] = {
    "VALIDATION_ERROR": InstanceInvalid,
    "INSTANCE_NOT_FOUND": InstanceNotFound,
    "ALREADY_RUNNING": InstanceRunning,
    "MODEL_NOT_FOUND": ModelNotFound,
    "MODEL_DOWNLOAD_FAILED": ModelDownloadFailed,
    "MODEL_LOAD_FAILED": ModelLoadFailed,
    "UNAVAILABLE": InstancesUnavailable,
}
EXPOSITION = ResponseSpec(
    str, generate_examples=False, description="Prometheus' text format", media_type="text/plain"
)
# Age at which a list of the models is read again for the status, which pages request every second: reading it
# goes through the files of the cache. Longest time that the status waits for it.
REGISTRY_REFRESH_S = 5.0
RECENT_TIMEOUT_S = 1.0
# Asks the parent process to carry out a request. Raises: TimeoutError.
AskParent = Callable[[HostCommand], Awaitable[HostResult]]


class ManagerHealth(msgspec.Struct):
    """Health of the API for instances. timestamp: RFC 3339, in UTC."""

    status: str
    timestamp: str


class RegisterModel(msgspec.Struct, forbid_unknown_fields=True):
    """A model of the Hub to list. model_id: its id there."""

    model_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class HostApi:
    """Requests about instances and models of this host. ask: None if this gateway has no `manager`."""

    def __init__(self, ask: AskParent | None) -> None:
        self._ask = ask
        self._recent: tuple[ModelInfo, ...] = ()
        self._read_at_s = -REGISTRY_REFRESH_S

    async def run(self, command: HostCommand) -> HostResult:
        """Return the result of a request. Raises: GatewayError."""
        if self._ask is None:
            raise NotFound(f"this gateway has {command.absent}")
        try:
            result = await self._ask(command)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the request takes long and continues in the background; "
                f"ask for the {command.subject}'s status"
            ) from error
        if result.refusal is not None:
            raise ERRORS[result.refusal.kind](result.refusal.message)
        return result

    async def instance(self, command: Act | Create) -> InstanceInfo:
        """Return the instance that a request was about. Raises: GatewayError."""
        return (await self.run(command)).instances[0]

    async def model(
        self, name: str, action: Literal["get", "download", "load"], by: Actor = GATEWAY
    ) -> ModelInfo:
        """Return the model that a request was about. name: as in the path. Raises: GatewayError."""
        return (await self.run(ActOnModel(model_name(name) or "", action, by))).models[0]

    async def recent_models(self) -> tuple[ModelInfo, ...]:
        """Return the models as of the last few seconds; none without `manager`.

        If the parent process does not answer in time, they are those of the last answer.
        """
        now_s = time.monotonic()
        if self._ask is not None and now_s - self._read_at_s >= REGISTRY_REFRESH_S:
            self._read_at_s = now_s
            with suppress(TimeoutError):
                async with asyncio.timeout(RECENT_TIMEOUT_S):
                    self._recent = (await self._ask(ListModels())).models
        return self._recent


_get = partial(get, responses=FAILURES, tags=TAGS)
# Declares a handler of an action on an instance or a model.
_action = partial(post, status_code=200, responses=FAILURES, tags=TAGS)


@_get("/admin/instances", opt=OPERATED)
async def list_instances(host: NamedDependency[HostApi]) -> list[InstanceInfo]:
    """List the instances of this host, in order of creation."""
    return list((await host.run(ListInstances())).instances)


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
    data: JSONBody[CreateInstance], host: NamedDependency[HostApi], operator: NamedDependency[Actor]
) -> InstanceInfo:
    """Create an instance and start it.

    It is sent calls once it is ready.
    """
    return await host.instance(Create(data, operator))


@_get("/admin/instances/{name:str}", opt=OPERATED)
async def get_instance(host: NamedDependency[HostApi], name: FromPath[str]) -> InstanceInfo:
    """Describe an instance."""
    return await host.instance(Act(name, "get"))


@delete("/admin/instances/{name:str}", status_code=204, responses=FAILURES, tags=TAGS, opt=OPERATED)
async def delete_instance(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> None:
    """Stop an instance and delete it.

    Calls in flight finish.
    """
    await host.run(Act(name, "delete", operator))


@_action("/admin/instances/{name:str}/start", opt=OPERATED)
async def start_instance(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> InstanceInfo:
    """Start an instance that is stopped or has failed."""
    return await host.instance(Act(name, "start", operator))


@_action("/admin/instances/{name:str}/stop", opt=OPERATED)
async def stop_instance(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> InstanceInfo:
    """Stop an instance.

    Calls in flight finish. A stopped instance stays as it is.
    """
    return await host.instance(Act(name, "stop", operator))


@_action("/admin/instances/{name:str}/restart", opt=OPERATED)
async def restart_instance(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> InstanceInfo:
    """Stop an instance and start it again."""
    return await host.instance(Act(name, "restart", operator))


@_get("/admin/instances/{name:str}/logs", opt=OPERATED)
async def get_log(
    host: NamedDependency[HostApi],
    name: FromPath[str],
    start: FromQuery[Position | None] = None,
    end: FromQuery[Position | None] = None,
) -> LogSlice:
    """Return lines of an instance's log, of which the last 1,000 are kept.

    `start` and `end` mean what they mean in a slice of Python's; negative numbers count from the end.
    """
    log = (await host.run(ReadLog(name, start, end))).log
    assert log is not None
    return log


@_get("/admin/manager/health", opt=OPEN, security=NO_KEY)
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
async def manager_metrics(host: NamedDependency[HostApi]) -> Response[bytes]:
    """Return counts of instances under TEI Manager's names; `/metrics` on `manager.listen`."""
    result = await host.run(ListInstances())
    body = "".join(f"{line}\n" for line in _metric_lines(result))
    return Response(body.encode(), media_type="text/plain; version=0.0.4")


def _metric_lines(result: HostResult) -> Iterator[str]:
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


@_get("/admin/registry", opt=OPERATED)
async def list_registry(host: NamedDependency[HostApi]) -> list[ModelInfo]:
    """List the models of this host; `/models` on `manager.listen`."""
    return list((await host.run(ListModels())).models)


@post(
    "/admin/registry",
    dto=OnePass[RegisterModel],
    return_dto=None,
    status_code=201,
    responses=FAILURES,
    tags=TAGS,
    opt=OPERATED,
)
async def register_model(
    data: JSONBody[RegisterModel], host: NamedDependency[HostApi], operator: NamedDependency[Actor]
) -> Response[ModelInfo]:
    """List a model of the Hub, without downloading it.

    Returns 200 for a model that is listed already.
    """
    result = await host.run(AddModel(data.model_id, operator))
    return Response(result.models[0], status_code=201 if result.is_new else 200)


@_get("/admin/registry/{name:str}", opt=NAMED)
async def get_registered(host: NamedDependency[HostApi], name: FromPath[str]) -> ModelInfo:
    """Describe a model of this host, with the progress of its download."""
    return await host.model(name, "get")


@_action("/admin/registry/{name:str}/download", opt=NAMED)
async def download_model(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> ModelInfo:
    """Download a model, as far as it is missing.

    Returns after 20 s at the latest; the download goes on, and the model's status is `downloading`.
    """
    return await host.model(name, "download", operator)


@_action("/admin/registry/{name:str}/load", opt=NAMED)
async def load_model(
    host: NamedDependency[HostApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> ModelInfo:
    """Check a model's files, load it once, and compute one text.

    Returns after 20 s at the latest; the load goes on, and the model's status is `loading`.
    """
    return await host.model(name, "load", operator)


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
    list_registry,
    register_model,
    get_registered,
    download_model,
    load_model,
]
