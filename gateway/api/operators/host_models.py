"""Operator endpoints for the models of this host, in TEI Manager's shapes.

The parent process downloads and loads; these endpoints send it requests. API keys need the scope admin.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from gateway.api.dialects.manager.dialect import MANAGER
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import document_errors
from gateway.api.server.paths import model_name, route_options
from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InstanceInvalid,
    InstancesUnavailable,
    ModelDownloadFailed,
    ModelLoadFailed,
    ModelNotFound,
    NotFound,
)
from gateway.registry.requests import ActOnModel, AddModel, ListModels, ModelCommand, ModelInfo, ModelResult

OPERATED = route_options(errors=MANAGER, for_operators=True, needs_admin=True)
NAMED = route_options(errors=MANAGER, for_operators=True, needs_admin=True, name_has_slashes=True)
FAILURES = document_errors(MANAGER)
TAGS = ["Instances"]
# The problem's kind → error of the reply.
ERRORS: dict[str, type[GatewayError]] = {
    "VALIDATION_ERROR": InstanceInvalid,
    "MODEL_NOT_FOUND": ModelNotFound,
    "MODEL_DOWNLOAD_FAILED": ModelDownloadFailed,
    "MODEL_LOAD_FAILED": ModelLoadFailed,
    "UNAVAILABLE": InstancesUnavailable,
}
# Asks the parent process to carry out a request. Raises: TimeoutError.
AskAboutModels = Callable[[ModelCommand], Awaitable[ModelResult]]
# Age at which a list of the models is read again for the status, which pages request every second: reading it
# goes through the files of the cache. Longest time that the status waits for it.
REGISTRY_REFRESH_S = 5.0
RECENT_TIMEOUT_S = 1.0


class RegisterModel(msgspec.Struct, forbid_unknown_fields=True):
    """A model of the Hub to list. model_id: its id there."""

    model_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class RegistryApi:
    """Requests about models of this host. ask: None if this gateway has no `manager`."""

    def __init__(self, ask: AskAboutModels | None) -> None:
        self._ask = ask
        self._recent: tuple[ModelInfo, ...] = ()
        self._read_at_s = -REGISTRY_REFRESH_S

    async def recent(self) -> tuple[ModelInfo, ...]:
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

    async def run(self, command: ModelCommand) -> ModelResult:
        """Return the result of a request. Raises: GatewayError."""
        if self._ask is None:
            raise NotFound("this gateway has no registry; `manager.listen` in router.yaml adds it")
        try:
            result = await self._ask(command)
        except TimeoutError as error:
            message = "the request takes long and continues in the background; ask for the model's status"
            raise DeadlineExceeded(message) from error
        if result.problem is not None:
            raise ERRORS[result.problem.kind](result.problem.message)
        return result

    async def act(self, command: ActOnModel) -> ModelInfo:
        """Return the model that a request was about. Raises: GatewayError."""
        return (await self.run(command)).models[0]


@get("/admin/registry", responses=FAILURES, tags=TAGS, opt=OPERATED)
async def list_registry(registry: NamedDependency[RegistryApi]) -> list[ModelInfo]:
    """List the models of this host; `/models` on `manager.listen`."""
    return list((await registry.run(ListModels())).models)


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
    data: JSONBody[RegisterModel], registry: NamedDependency[RegistryApi]
) -> Response[ModelInfo]:
    """List a model of the Hub, without downloading it.

    Returns 200 for a model that is listed already.
    """
    result = await registry.run(AddModel(data.model_id))
    return Response(result.models[0], status_code=201 if result.is_new else 200)


@get("/admin/registry/{name:str}", responses=FAILURES, tags=TAGS, opt=NAMED)
async def get_registered(registry: NamedDependency[RegistryApi], name: FromPath[str]) -> ModelInfo:
    """Describe a model of this host, with the progress of its download."""
    return await registry.act(ActOnModel(model_name(name) or "", "get"))


@post("/admin/registry/{name:str}/download", status_code=200, responses=FAILURES, tags=TAGS, opt=NAMED)
async def download_model(registry: NamedDependency[RegistryApi], name: FromPath[str]) -> ModelInfo:
    """Download a model, as far as it is missing.

    Returns after 20 s at the latest; the download goes on, and the model's status is `downloading`.
    """
    return await registry.act(ActOnModel(model_name(name) or "", "download"))


@post("/admin/registry/{name:str}/load", status_code=200, responses=FAILURES, tags=TAGS, opt=NAMED)
async def load_model(registry: NamedDependency[RegistryApi], name: FromPath[str]) -> ModelInfo:
    """Check a model's files, load it once, and compute one text.

    Returns after 20 s at the latest; the load goes on, and the model's status is `loading`.
    """
    return await registry.act(ActOnModel(model_name(name) or "", "load"))


HANDLERS = [list_registry, register_model, get_registered, download_model, load_model]
