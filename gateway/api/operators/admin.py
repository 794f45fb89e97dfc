"""For operators: keys, tenants, usage, reload. Keys need the scope admin.

No key is needed from this machine on a loopback listener, where `admin.keys` lists none.
"""

import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal

import msgspec
from litestar import Response, delete, get, post, put
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.handlers.base import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, OpenAPIType, Operation, Schema
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.server.authentication import Authenticator
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext, context_of
from gateway.config import schema as config
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import Scope, is_loopback, limit_problems
from gateway.errors import DeadlineExceeded, GatewayError, InvalidInput, NotFound, QuotaUnavailable
from gateway.quotas.ledger import Ledger
from gateway.quotas.usage import UsageRow, as_csv, days_between
from gateway.store.errors import StoreUnavailable
from gateway.tenants.keyring import StoredKey, id_problem, make_key, name_problem, unknown_tenant_note
from gateway.tenants.store import TenantStore

FAILURES = documented("tei")
# Have router.yaml read again, and told what came of it. Raises: TimeoutError.
Reload = Callable[[], Awaitable[ReloadOutcome]]
# How a handler says that it is for operators alone: nobody else's body is read.
OPERATORS = {"operators": True}
# What proxies and pages add, however they are set up; beside all that begins with x-forwarded.
RELAYED = frozenset(
    (b"origin", b"referer", b"forwarded", b"via", b"x-real-ip", b"cf-connecting-ip", b"true-client-ip")
)
# A name or an address in brackets, and a port.
HOST = re.compile(r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<plain>[^:\[\]@]+))(?::\d{1,5})?")


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A key to make.

    expires: a day or a moment; without a time zone it is UTC. limits: of the key, beside its tenant's.
    """

    tenant: str
    id: str | None = None
    expires: str | None = None
    scopes: list[Scope] | None = None
    models: list[str] | None = None
    limits: dict[str, config.LimitAmount] = {}


class KeyShown(msgspec.Struct):
    """A key without its secret. expires: seconds since 1970. limits: its own, beside its tenant's."""

    id: str
    tenant: str
    expires: float | None
    scopes: list[str] | None
    models: list[str] | None
    limits: dict[str, int]


class KeyMade(msgspec.Struct):
    """The one time that the key itself is shown. notes: what it names that is nowhere yet."""

    key: str
    shown: KeyShown
    notes: list[str]


class TenantSettings(msgspec.Struct, forbid_unknown_fields=True):
    """A tenant that stands in Redis, as router.yaml would say it; its keys are made one by one."""

    models: list[str] | None = None
    limits: dict[str, config.LimitAmount] = {}
    model_limits: dict[str, dict[str, config.LimitAmount]] = {}
    weight: config.PositiveInt = 1
    priority: Literal["interactive", "bulk"] = "interactive"
    queue_tokens: config.PositiveInt | None = None
    join: bool = True


class TenantShown(msgspec.Struct):
    """A tenant that stands in Redis. in_file: router.yaml has one of that name too, and that one counts."""

    name: str
    settings: TenantSettings
    in_file: bool


class Removed(msgspec.Struct):
    """An empty object."""


# What kinds of problem an outcome has.
PROBLEMS: dict[str, type[GatewayError]] = {
    "invalid": InvalidInput,
    "unknown": NotFound,
    "unavailable": QuotaUnavailable,
}
REMOVED = {200: ResponseSpec(Removed, generate_examples=False, description="It is gone")}


class UsageResponse(msgspec.Struct):
    """What a tenant used, as its quotas settled it."""

    data: list[UsageRow]


@dataclass
class UsageOperation(Operation):
    """Documents the sheet beside the JSON, for which Litestar has one place."""

    def __post_init__(self) -> None:
        """Add the sheet to what Litestar has made of the handler."""
        answered = (self.responses or {})["200"]
        assert isinstance(answered, OpenAPIResponse)
        assert answered.content is not None
        answered.content["text/csv"] = OpenAPIMediaType(Schema(type=OpenAPIType.STRING))


class Admin:
    """What these handlers are given.

    store: None where router.yaml is all. is_loopback: of the listener. in_file: router.yaml's tenants.
    models: the names of those that are served.
    """

    def __init__(
        self,
        served: config.Config,
        ledger: Ledger,
        store: TenantStore | None,
        authenticator: Authenticator,
        reload: Reload | None,
        *,
        is_loopback: bool,
    ) -> None:
        self.ledger = ledger
        self._authenticator = authenticator
        self._store = store
        self._reload = reload
        self._is_loopback = is_loopback
        self.follow(served)

    def follow(self, served: config.Config) -> None:
        """Stand beside what is served from now on."""
        self.in_file: Collection[str] = served.tenants.keys()
        self.models: Collection[str] = served.models.keys()
        self._is_open = self._is_loopback and not served.admin.keys

    async def guard(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        """For Litestar, before it reads a body. Raises: Unauthenticated, AuthThrottled, ScopeForbidden."""
        if not handler.opt.get("operators"):
            return
        context = context_of(connection.scope)
        if not (self._is_open and comes_from_here(context)):
            self._authenticator.authenticate(context).require("admin")

    @property
    def store(self) -> TenantStore:
        """Raises: NotFound where there is none."""
        if self._store is None:
            raise NotFound(
                "tenants and keys stand in router.yaml here; a Redis `quotas.store` would hold others"
            )
        return self._store

    @property
    def reload(self) -> Reload:
        """Raises: NotFound where nobody would read the file."""
        if self._reload is None:
            raise NotFound("this gateway does not read its configuration again")
        return self._reload


def comes_from_here(context: RequestContext) -> bool:
    """Whether a request was made on this machine, by no web page and through no proxy.

    A page of another origin, or one whose name was made to lead here, is told by these headers; a proxy on
    this machine would let in the world. One that adds no header of its own speaks HTTP/1.0 unless it was told
    otherwise, as nginx does.
    """
    names = [name for name, _ in context.headers]
    relayed = any(name in RELAYED or name.startswith(b"x-forwarded") for name in names)
    foreign = context.header(b"sec-fetch-site", "none") not in ("none", "same-origin")
    if relayed or foreign or names.count(b"host") != 1 or context.http_version == "1.0":
        return False
    found = HOST.fullmatch(context.header(b"host"))
    return found is not None and is_loopback((found["bracketed"] or found["plain"]).lower())


def shown(key: StoredKey) -> KeyShown:
    """A stored key as operators see it."""
    scopes = None if key.scopes is None else list(key.scopes)
    models = None if key.models is None else list(key.models)
    return KeyShown(key.id, key.tenant, key.expires_s, scopes, models, key.limits)


@get("/admin/keys", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_keys(
    admin: NamedDependency[Admin],
) -> list[KeyShown]:
    """All keys that stand in Redis."""
    try:
        return [shown(key) for key in await admin.store.keys()]
    except StoreUnavailable as error:
        raise _away() from error


@post(
    "/admin/keys",
    dto=OnePass[KeyRequest],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(KeyMade, description="The key, shown this once")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def create_key(
    data: JSONBody[KeyRequest],
    admin: NamedDependency[Admin],
) -> KeyMade:
    """Make a key."""
    for field, problem in (("id", id_problem(data.id)), ("tenant", name_problem(data.tenant))):
        if problem:
            raise InvalidInput(f"{field}: {problem}", param=field)
    check_limits(data.limits)
    key, stored = make_key(data.tenant, data.id, _moment(data.expires), data.scopes, data.models, data.limits)
    if stored.expires_s is not None and stored.expires_s <= time.time():
        raise InvalidInput("expires: that is in the past", param="expires")
    try:
        if any(one.id == stored.id for one in await admin.store.keys()):
            raise InvalidInput(f"there is a key {stored.id!r} already", param="id")
        notes = _notes(data, {*admin.in_file, *await admin.store.tenants()}, admin.models)
        await admin.store.put(stored)
    except StoreUnavailable as error:
        raise _away() from error
    return KeyMade(key, shown(stored), notes)


def _notes(asked: KeyRequest, tenants: Collection[str], models: Collection[str]) -> list[str]:
    """What of it is nowhere yet."""
    tenant = [] if asked.tenant in tenants else [unknown_tenant_note(asked.tenant)]
    return tenant + [f"model {name} is not served here" for name in asked.models or () if name not in models]


@delete(
    "/admin/keys/{key_id:str}",
    status_code=200,
    responses=REMOVED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def revoke_key(
    admin: NamedDependency[Admin],
    key_id: FromPath[str],
) -> Response[bytes]:
    """Revoke a key; every gateway refuses it within a second."""
    try:
        if not await admin.store.revoke(key_id):
            raise NotFound(f"there is no key {key_id!r}")
    except StoreUnavailable as error:
        raise _away() from error
    return Response(b"{}", media_type="application/json")


@get("/admin/tenants", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_tenants(
    admin: NamedDependency[Admin],
) -> list[TenantShown]:
    """All tenants that stand in Redis."""
    try:
        tenants = await admin.store.tenants()
    except StoreUnavailable as error:
        raise _away() from error
    return [
        TenantShown(name, settings_shown(one), in_file=name in admin.in_file) for name, one in tenants.items()
    ]


@put(
    "/admin/tenants/{name:str}",
    dto=OnePass[TenantSettings],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(TenantShown, description="As it stands now")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def put_tenant(
    data: JSONBody[TenantSettings],
    admin: NamedDependency[Admin],
    name: FromPath[str],
) -> TenantShown:
    """Add a tenant, or replace it; every gateway follows within a second."""
    if problem := name_problem(name):
        raise InvalidInput(problem)
    try:
        await admin.store.put_tenant(name, tenant_of(data))
    except StoreUnavailable as error:
        raise _away() from error
    return TenantShown(name, data, in_file=name in admin.in_file)


@delete(
    "/admin/tenants/{name:str}",
    status_code=200,
    responses=REMOVED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def remove_tenant(
    admin: NamedDependency[Admin],
    name: FromPath[str],
) -> Response[bytes]:
    """Remove a tenant and its keys; every gateway follows within a second."""
    try:
        if not await admin.store.remove_tenant(name):
            raise NotFound(f"there is no tenant {name!r}")
    except StoreUnavailable as error:
        raise _away() from error
    return Response(b"{}", media_type="application/json")


def _moment(written: str | None) -> datetime | None:
    """Raises: InvalidInput where it is none."""
    try:
        return None if written is None else datetime.fromisoformat(written)
    except ValueError as error:
        raise InvalidInput(
            "expires: a day such as 2027-01-31, or a moment such as 2027-01-31T12:00:00Z", param="expires"
        ) from error


def settings_shown(tenant: config.TenantConfig) -> TenantSettings:
    """A stored tenant as operators see it."""
    return msgspec.convert(
        {name: value for name, value in msgspec.to_builtins(tenant).items() if name != "keys"}, TenantSettings
    )


def tenant_of(settings: TenantSettings) -> config.TenantConfig:
    """Settings as they are stored.

    Raises: InvalidInput where a limit has no name of one.
    """
    for limits in (settings.limits, *settings.model_limits.values()):
        check_limits(limits)
    return msgspec.convert(msgspec.to_builtins(settings), config.TenantConfig)


def check_limits(limits: Mapping[str, int]) -> None:
    """Raises: InvalidInput where a limit has no name of one."""
    for name, problem in limit_problems(limits).items():
        raise InvalidInput(f"{name}: {problem}", param="limits")


@get(
    "/admin/usage",
    responses={200: ResponseSpec(UsageResponse, description="What was used; or a sheet")} | FAILURES,
    operation_class=UsageOperation,
    tags=["Operators"],
    opt=OPERATORS,
)
async def usage(
    admin: NamedDependency[Admin],
    tenant: FromQuery[str],
    since: FromQuery[date | None] = None,
    until: FromQuery[date | None] = None,
    form: FromQuery[Literal["json", "csv"]] = "json",
) -> Response[bytes]:
    """A tenant's usage by model and day (UTC); without dates, today's."""
    rows = await admin.ledger.usage(tenant, days_between(since, until))
    if form == "csv":
        return Response(as_csv(rows), media_type="text/csv")
    return Response(msgspec.json.encode(UsageResponse(rows)), media_type="application/json")


class ChangeShown(msgspec.Struct):
    """One thing of the file that differs. detail: was → is, where that is no secret."""

    path: str
    how: Literal["added", "removed", "changed"]
    detail: str


class ReloadShown(msgspec.Struct):
    """What a reload changed, and what of the file it left as it was, which needs a restart."""

    changes: list[ChangeShown]
    needs_restart: list[ChangeShown]


@post(
    "/admin/reload",
    status_code=200,
    responses={200: ResponseSpec(ReloadShown, description="It counts for every new call")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def reload(admin: NamedDependency[Admin]) -> ReloadShown:
    """Read router.yaml again and serve what it says now; a file with a problem changes nothing."""
    return await outcome_shown(admin.reload())


async def outcome_shown(work: Awaitable[ReloadOutcome]) -> ReloadShown:
    """What came of it, for operators.

    Raises: InvalidInput, NotFound or QuotaUnavailable, where nothing has changed; DeadlineExceeded.
    """
    try:
        outcome = await work
    except TimeoutError as error:
        raise DeadlineExceeded("the reload takes long and goes on; the log tells how it ends") from error
    if outcome.problems:
        raise problems_shown(outcome.problems, PROBLEMS[outcome.kind])
    return ReloadShown(_changes_shown(outcome.changes), _changes_shown(outcome.needs_restart))


def problems_shown(problems: Iterable[Problem], kind: type[GatewayError] = InvalidInput) -> GatewayError:
    """Every problem with its path."""
    return kind("nothing has changed: " + "; ".join(f"{one.path}: {one.message}" for one in problems))


def _changes_shown(changes: Iterable[ConfigChange]) -> list[ChangeShown]:
    return [ChangeShown(one.path, one.how, one.detail) for one in changes]


def _away() -> QuotaUnavailable:
    return QuotaUnavailable("the store of tenants and keys is away")


HANDLERS = [list_keys, create_key, revoke_key, list_tenants, put_tenant, remove_tenant, usage, reload]
