"""Operator endpoints for upstreams and models in addition to those of router.yaml.

The parent process stores the additions. These endpoints send it edits and read its
listing. API keys need the scope admin.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from gateway.api.operators.admin import CHANGED, ReloadReport, problems_error, report
from gateway.api.server.body import AsWritten
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.paths import model_name, route_options
from gateway.audit.records import Actor
from gateway.config import schema as config
from gateway.config.diff import ReloadOutcome
from gateway.config.reader import type_problems
from gateway.config.upstream_checks import missing_upstream
from gateway.declared.additions import AdditionInfo, Edit, Listing, Part, Put, Remove
from gateway.errors import DeadlineExceeded, InvalidInput, NotFound

ADDED = route_options(for_operators=True, needs_admin=True, name_has_slashes=True)
FAILURES = document_errors(TEI)
# Settings written by hand are far smaller. All additions together have a bound too, because every gateway
# keeps them in memory.
SETTINGS_BYTES_MAX = 32 * 1024
KINDS: dict[Part, type[config.Section]] = {
    "upstreams": config.UpstreamSettings,
    "models": config.ModelSettings,
}


@dataclass(frozen=True, slots=True)
class AdditionsClient:
    """Connection to the parent process, which stores the additions.

    change: applies an edit. listing: returns all additions. Both raise TimeoutError.
    """

    change: Callable[[Edit], Awaitable[ReloadOutcome]]
    listing: Callable[[], Awaitable[Listing]]


class AdditionsApi:
    """Edits and listings of additions. adding: None if this gateway has no store for additions."""

    def __init__(self, adding: AdditionsClient | None) -> None:
        self._adding = adding

    def _parent(self) -> AdditionsClient:
        """Return the connection to the parent. Raises: NotFound."""
        if self._adding is None:
            raise NotFound("this gateway serves only its own configuration")
        return self._adding

    async def put(self, part: Part, segment: str, settings: Any, by: Actor) -> ReloadReport:
        """Add or replace an upstream or a model. segment: its name, as in the path.

        Raises: GatewayError, with every problem of the settings.
        """
        name = _name(segment)
        problems = list(type_problems(settings, KINDS[part], f"{part}.{name}"))
        if part == "models" and not problems:
            problems = list(missing_upstream(name, settings))
        if problems:
            raise problems_error(problems)
        if len(msgspec.json.encode((name, settings))) > SETTINGS_BYTES_MAX:
            raise InvalidInput(f"name and settings are more than {SETTINGS_BYTES_MAX} bytes")
        return await self.edit(Put(part, name, settings, by))

    async def remove(self, part: Part, segment: str, by: Actor) -> ReloadReport:
        """Remove an addition. segment: its name, as in the path. Raises: GatewayError."""
        return await self.edit(Remove(part, _name(segment), by))

    async def edit(self, edit: Edit) -> ReloadReport:
        """Let the parent carry out an edit. Raises: GatewayError."""
        return await report(self._parent().change(edit))

    async def listing(self) -> Listing:
        """Return all additions. Raises: NotFound, DeadlineExceeded."""
        try:
            return await self._parent().listing()
        except TimeoutError as error:
            raise DeadlineExceeded("the gateway's parent process does not answer") from error


def _name(segment: str) -> str:
    name = model_name(segment) or ""
    if len(name.encode(errors="replace")) > SETTINGS_BYTES_MAX:
        raise InvalidInput("the name is too long")
    return name


def _find(entries: Iterable[AdditionInfo], segment: str) -> AdditionInfo:
    """Return the entry with the name in the path. Raises: NotFound."""
    name = model_name(segment)
    for entry in entries:
        if entry.name == name:
            return entry
    raise NotFound(f"there is no addition named {name!r}; entries of router.yaml are listed only there")


_get = partial(get, responses=FAILURES, tags=["Operators"], opt=ADDED)
_put = partial(
    put, return_dto=None, status_code=200, responses=CHANGED | FAILURES, tags=["Operators"], opt=ADDED
)
_delete = partial(delete, status_code=200, responses=CHANGED | FAILURES, tags=["Operators"], opt=ADDED)


@_get("/admin/upstreams")
async def list_upstreams(adding: NamedDependency[AdditionsApi]) -> list[AdditionInfo]:
    """List the upstreams that operators added."""
    return list((await adding.listing()).upstreams)


@_get("/admin/upstreams/{name:str}")
async def get_upstream(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> AdditionInfo:
    """Describe an upstream that operators added."""
    return _find((await adding.listing()).upstreams, name)


@_put("/admin/upstreams/{name:str}", dto=AsWritten[config.UpstreamSettings])
async def put_upstream(
    data: JSONBody[dict[str, Any]],
    adding: NamedDependency[AdditionsApi],
    operator: NamedDependency[Actor],
    name: FromPath[str],
) -> ReloadReport:
    """Add an upstream, or replace an added one.

    Secrets are written as references. Every gateway applies the change.
    """
    return await adding.put("upstreams", name, data, operator)


@_delete("/admin/upstreams/{name:str}")
async def remove_upstream(
    adding: NamedDependency[AdditionsApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> ReloadReport:
    """Remove an added upstream.

    No model may use it any more.
    """
    return await adding.remove("upstreams", name, operator)


@_get("/admin/models")
async def list_added_models(adding: NamedDependency[AdditionsApi]) -> list[AdditionInfo]:
    """List the models that operators added."""
    return list((await adding.listing()).models)


@_get("/admin/models/{name:str}")
async def get_added_model(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> AdditionInfo:
    """Describe a model that operators added."""
    return _find((await adding.listing()).models, name)


@_put("/admin/models/{name:str}", dto=AsWritten[config.ModelSettings])
async def put_model(
    data: JSONBody[dict[str, Any]],
    adding: NamedDependency[AdditionsApi],
    operator: NamedDependency[Actor],
    name: FromPath[str],
) -> ReloadReport:
    """Add a model, or replace an added one.

    Every gateway applies the change.
    """
    return await adding.put("models", name, data, operator)


@_delete("/admin/models/{name:str}")
async def remove_model(
    adding: NamedDependency[AdditionsApi], operator: NamedDependency[Actor], name: FromPath[str]
) -> ReloadReport:
    """Remove an added model.

    Calls in flight finish.
    """
    return await adding.remove("models", name, operator)


HANDLERS = [
    list_upstreams,
    get_upstream,
    put_upstream,
    remove_upstream,
    list_added_models,
    get_added_model,
    put_model,
    remove_model,
]
