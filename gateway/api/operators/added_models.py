"""For operators: upstreams and models beside those of router.yaml. Keys need the scope admin.

Knows nothing of where additions stand: the parent process does, and answers.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from gateway.additions.entries import AdditionEntry, Edit, Listing, Part, Put, Remove
from gateway.api.operators.admin import FAILURES, OPERATORS, ReloadShown, outcome_shown, problems_shown
from gateway.api.server.body import AsWritten
from gateway.api.server.paths import model_name
from gateway.config import schema as config
from gateway.config.diff import ReloadOutcome
from gateway.config.type_checks import type_problems
from gateway.errors import DeadlineExceeded, InvalidInput, NotFound

# With what else it says, a line to the parent stays below the 64 KiB that its reader takes.
SETTINGS_BYTES_MAX = 32 * 1024
KINDS: dict[Part, type[config.Section]] = {
    "upstreams": config.UpstreamSettings,
    "models": config.ModelSettings,
}
CHANGED = {
    200: ResponseSpec(ReloadShown, generate_examples=False, description="It counts for every new call")
}


@dataclass(frozen=True, slots=True)
class Adding:
    """How the parent is asked: to change what was added, and what that is. Both raise TimeoutError."""

    change: Callable[[Edit], Awaitable[ReloadOutcome]]
    listing: Callable[[], Awaitable[Listing]]


class AdditionsApi:
    """What these handlers are given; adding: None where nobody would add anything."""

    def __init__(self, adding: Adding | None) -> None:
        self._adding = adding

    @property
    def _parent(self) -> Adding:
        if self._adding is None:
            raise NotFound("this gateway serves what its configuration says, and nothing else")
        return self._adding

    async def put(self, part: Part, segment: str, settings: Any) -> ReloadShown:
        """Raises: GatewayError, with every problem of the settings."""
        name = _name(segment)
        if problems := list(type_problems(settings, KINDS[part], f"{part}.{name}")):
            raise problems_shown(problems)
        if len(msgspec.json.encode((name, settings))) > SETTINGS_BYTES_MAX:
            raise InvalidInput(f"name and settings are more than {SETTINGS_BYTES_MAX} bytes")
        return await outcome_shown(self._parent.change(Put(part, name, settings)))

    async def remove(self, part: Part, segment: str) -> ReloadShown:
        """Raises: GatewayError."""
        return await outcome_shown(self._parent.change(Remove(part, _name(segment))))

    async def listing(self) -> Listing:
        """Raises: DeadlineExceeded."""
        try:
            return await self._parent.listing()
        except TimeoutError as error:
            raise DeadlineExceeded("the gateway's parent process does not answer") from error


def _name(segment: str) -> str:
    name = model_name(segment) or ""
    if len(name.encode(errors="replace")) > SETTINGS_BYTES_MAX:
        raise InvalidInput("the name is too long")
    return name


class Added(msgspec.Struct):
    """An upstream or a model beside those of router.yaml; references stand in the place of secrets.

    problem: why this gateway does not serve it, if it does not.
    """

    name: str
    settings: dict[str, Any]
    problem: str | None


def _named(listed: Iterable[AdditionEntry], segment: str) -> AdditionEntry:
    """Raises: NotFound."""
    name = model_name(segment)
    found = next((one for one in listed if one.name == name), None)
    if found is None:
        raise NotFound(f"nothing was added by the name {name!r}; what router.yaml defines is there")
    return found


@get("/admin/upstreams", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_upstreams(adding: NamedDependency[AdditionsApi]) -> list[Added]:
    """All upstreams that were added to those of router.yaml."""
    return [_shown(one) for one in (await adding.listing()).upstreams]


@get("/admin/upstreams/{name:str}", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def get_upstream(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> Added:
    """One of them."""
    return _shown(_named((await adding.listing()).upstreams, name))


@put(
    "/admin/upstreams/{name:str}",
    dto=AsWritten[config.UpstreamSettings],
    return_dto=None,
    status_code=200,
    responses=CHANGED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def put_upstream(
    data: JSONBody[dict[str, Any]], adding: NamedDependency[AdditionsApi], name: FromPath[str]
) -> ReloadShown:
    """Add an upstream, or replace one that was added; secrets are references. Every gateway follows."""
    return await adding.put("upstreams", name, data)


@delete(
    "/admin/upstreams/{name:str}",
    status_code=200,
    responses=CHANGED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def remove_upstream(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> ReloadShown:
    """Remove an upstream that was added, and that serves no model any more."""
    return await adding.remove("upstreams", name)


@get("/admin/models", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_added_models(adding: NamedDependency[AdditionsApi]) -> list[Added]:
    """All models that were added to those of router.yaml."""
    return [_shown(one) for one in (await adding.listing()).models]


@get("/admin/models/{name:str}", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def get_added_model(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> Added:
    """One of them."""
    return _shown(_named((await adding.listing()).models, name))


@put(
    "/admin/models/{name:str}",
    dto=AsWritten[config.ModelSettings],
    return_dto=None,
    status_code=200,
    responses=CHANGED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def put_model(
    data: JSONBody[dict[str, Any]], adding: NamedDependency[AdditionsApi], name: FromPath[str]
) -> ReloadShown:
    """Add a model, or replace one that was added. Every gateway follows."""
    return await adding.put("models", name, data)


@delete(
    "/admin/models/{name:str}",
    status_code=200,
    responses=CHANGED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def remove_model(adding: NamedDependency[AdditionsApi], name: FromPath[str]) -> ReloadShown:
    """Remove a model that was added; calls that have begun end as they would have."""
    return await adding.remove("models", name)


def _shown(one: AdditionEntry) -> Added:
    return Added(one.name, one.settings, one.problem)


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
