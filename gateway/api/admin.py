"""For operators: keys and usage. Open on a loopback listener; elsewhere a key needs the scope admin."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.answering import Api
from gateway.api.body import OnePass
from gateway.api.failures import documented
from gateway.config import Scope
from gateway.errors import InvalidInput, NotFound, QuotaUnavailable
from gateway.quotas.ledger import Ledger, UsageRow
from gateway.quotas.redis_door import StoreAway
from gateway.tenants.keyring import StoredKey, make_key
from gateway.tenants.store import KeyStore

FAILURES = documented("tei")
DAYS_MAX = 400
USAGE_COLUMNS = ("tenant", "day", "model", "requests", "tokens", "inputs")


class KeyRequest(msgspec.Struct):
    """A key to make. expires: without a time zone it is UTC."""

    tenant: str
    id: str | None = None
    expires: datetime | None = None
    scopes: list[Scope] | None = None
    models: list[str] | None = None


class KeyShown(msgspec.Struct):
    """A key without its secret. expires: seconds since 1970."""

    id: str
    tenant: str
    expires: float | None
    scopes: list[str] | None
    models: list[str] | None


class KeyMade(msgspec.Struct):
    """The one time that the key itself is shown."""

    key: str
    shown: KeyShown


class UsageResponse(msgspec.Struct):
    """What a tenant used, as its quotas settled it."""

    data: list[UsageRow]


class Admin:
    """What these handlers are given. store: None where keys stand in router.yaml only."""

    def __init__(self, ledger: Ledger, store: KeyStore | None, *, is_open: bool) -> None:
        self.ledger = ledger
        self._store = store
        self._is_open = is_open

    def check(self, request: Request[Any, Any, Any], api: Api) -> None:
        """Raises: Unauthenticated, ScopeForbidden."""
        if not self._is_open:
            api.identity.of(request).require("admin")

    @property
    def store(self) -> KeyStore:
        """Raises: NotFound where there is none."""
        if self._store is None:
            raise NotFound("keys stand in router.yaml here; a Redis `quotas.store` would hold others")
        return self._store


def shown(key: StoredKey) -> KeyShown:
    """A stored key as operators see it."""
    scopes = None if key.scopes is None else list(key.scopes)
    return KeyShown(
        key.id, key.tenant, key.expires_s, scopes, None if key.models is None else list(key.models)
    )


@get("/admin/keys", tags=["Operators"])
async def list_keys(
    request: Request[Any, Any, Any], api: NamedDependency[Api], admin: NamedDependency[Admin]
) -> list[KeyShown]:
    """All keys that stand in Redis."""
    admin.check(request, api)
    try:
        return [shown(key) for key in await admin.store.all()]
    except StoreAway as error:
        raise _away() from error


@post(
    "/admin/keys",
    dto=OnePass[KeyRequest],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(KeyMade, description="The key, shown this once")} | FAILURES,
    tags=["Operators"],
)
async def create_key(
    data: JSONBody[KeyRequest],
    request: Request[Any, Any, Any],
    api: NamedDependency[Api],
    admin: NamedDependency[Admin],
) -> KeyMade:
    """Make a key."""
    admin.check(request, api)
    key, stored = make_key(data.tenant, data.id, data.expires, data.scopes, data.models)
    try:
        if any(one.id == stored.id for one in await admin.store.all()):
            raise InvalidInput(f"there is a key {stored.id!r} already", param="id")
        await admin.store.put(stored)
    except StoreAway as error:
        raise _away() from error
    return KeyMade(key, shown(stored))


@delete("/admin/keys/{key_id:str}", status_code=200, tags=["Operators"])
async def revoke_key(
    request: Request[Any, Any, Any],
    api: NamedDependency[Api],
    admin: NamedDependency[Admin],
    key_id: FromPath[str],
) -> Response[bytes]:
    """Revoke a key; every gateway refuses it within a second."""
    admin.check(request, api)
    try:
        if not await admin.store.revoke(key_id):
            raise NotFound(f"there is no key {key_id!r}")
    except StoreAway as error:
        raise _away() from error
    return Response(b"{}", media_type="application/json")


@get("/admin/usage", tags=["Operators"])
async def usage(
    request: Request[Any, Any, Any],
    api: NamedDependency[Api],
    admin: NamedDependency[Admin],
    tenant: FromQuery[str],
    since: FromQuery[date | None] = None,
    until: FromQuery[date | None] = None,
    form: FromQuery[Literal["json", "csv"]] = "json",
) -> Response[bytes]:
    """A tenant's usage by model and day (UTC); without dates, today's."""
    admin.check(request, api)
    rows = await admin.ledger.usage(tenant, days_between(since, until))
    if form == "csv":
        return Response(as_csv(rows), media_type="text/csv")
    return Response(msgspec.json.encode(UsageResponse(rows)), media_type="application/json")


def days_between(since: date | None, until: date | None) -> list[str]:
    """YYYY-MM-DD of each day, both ends included.

    Raises: InvalidInput.
    """
    last = until or datetime.now(UTC).date()
    first = since or last
    count = (last - first).days + 1
    if not 1 <= count <= DAYS_MAX:
        raise InvalidInput(f"from 1 to {DAYS_MAX} days, not {count}", param="since")
    return [(first + timedelta(days=number)).isoformat() for number in range(count)]


def as_csv(rows: Sequence[UsageRow]) -> bytes:
    """One line a row, after the names of the columns."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(USAGE_COLUMNS)
    writer.writerows([getattr(row, column) for column in USAGE_COLUMNS] for row in rows)
    return text.getvalue().encode()


def _away() -> QuotaUnavailable:
    return QuotaUnavailable("the store of keys is away")


HANDLERS = [list_keys, create_key, revoke_key, usage]
