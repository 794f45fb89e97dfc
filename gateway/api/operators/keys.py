"""Operator endpoints for stored keys: in Redis, or in a file. API keys need the scope admin."""

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, cast

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.operators.access import OPERATORS, REMOVED, check_limits, store_errors
from gateway.api.operators.admin import Admin
from gateway.api.operators.directory import TenantDirectory
from gateway.api.operators.pages import Paging, paging_of
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.audit.records import Actor
from gateway.config import schema as config
from gateway.config.durations import duration_s
from gateway.config.schema import Scope
from gateway.errors import AlreadyExists, InvalidInput, NotFound
from gateway.tenants.create_key import (
    CannotRotate,
    InvalidKeySettings,
    NewKey,
    make_key,
    new_secret,
    succeed,
)
from gateway.tenants.directory import KeyEntry, Source, folded
from gateway.tenants.keyring import StoredKey, unknown_tenant_note
from gateway.tenants.store import KeyExists

FAILURES = document_errors(TEI)
SORTS = ("id", "tenant", "created", "last_used", "expires")


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A key to create.

    expires: a day or a time, in UTC without a time zone. limits: of the key, in addition to its tenant's.
    defaults: by operation, the model of a request that names none.
    """

    tenant: str
    id: str | None = None
    expires: str | None = None
    scopes: list[Scope] | None = None
    models: list[str] | None = None
    limits: dict[str, config.LimitAmount] = {}
    defaults: dict[str, str] = {}


class KeyInfo(msgspec.Struct):
    """A key without its secret.

    expires, created: seconds since 1970. created_by: actor of its record in the audit. last_used: day in UTC,
    null before the first use. limits: of the key, in addition to its tenant's. has_tenant: its tenant is
    defined; without it the key is denied with 403. successor: id of the key that replaces it. defaults: by
    operation, the model of a request that names none.
    """

    id: str
    tenant: str
    expires: float | None
    scopes: list[str] | None
    models: list[str] | None
    limits: dict[str, config.LimitAmount]
    has_tenant: bool
    created: float | None = None
    created_by: str | None = None
    last_used: str | None = None
    successor: str | None = None
    defaults: dict[str, str] = {}


class ListedKey(KeyInfo):
    """A key in a page.

    source: `store`, `file` for one of a tenant in router.yaml and for the first key, or `operators` for one
    of `admin.keys`. Keys that are not stored have neither a creation nor a last use.
    """

    source: Source = "store"


class KeyPage(msgspec.Struct, frozen=True):
    """Page of keys. total: those that the filters select."""

    data: list[ListedKey]
    total: int


class CreatedKey(msgspec.Struct):
    """A new key in the clear, which no other reply shows.

    notes: tenants and models in the request that do not exist yet, and budgets that nothing is spent from.
    """

    key: str
    shown: KeyInfo
    notes: list[str]


class RotateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A key to replace. overlap: time for which the old one stays valid. id: of the successor."""

    overlap: str = "24h"
    id: str | None = None


class RotatedKey(msgspec.Struct):
    """The successor of a key in the clear, which no other reply shows. ended: the old key."""

    key: str
    shown: KeyInfo
    ended: KeyInfo


def key_info(key: StoredKey, *, has_tenant: bool, last_used: str | None = None) -> KeyInfo:
    """Return a stored key without its digest."""
    scopes = None if key.scopes is None else list(key.scopes)
    models = None if key.models is None else list(key.models)
    return KeyInfo(
        key.id,
        key.tenant,
        key.expires_s,
        scopes,
        models,
        key.limits,
        has_tenant,
        key.created_s or None,
        key.created_by or None,
        last_used,
        key.successor or None,
        key.defaults,
    )


def listed_key(entry: KeyEntry, last_used: str | None) -> ListedKey:
    """Return a key of the directory without its digest."""
    last_used = last_used if entry.source == "store" else None
    info = key_info(entry.key, has_tenant=entry.has_tenant, last_used=last_used)
    return ListedKey(**msgspec.structs.asdict(info), source=entry.source)


@get(
    "/admin/keys",
    responses={
        200: ResponseSpec(
            cast("type[msgspec.Struct]", list[KeyInfo] | KeyPage),
            generate_examples=False,
            description="The stored keys; with a parameter, a page of all keys",
        )
    }
    | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def list_keys(
    admin: NamedDependency[Admin],
    directory: NamedDependency[TenantDirectory],
    tenant: FromQuery[str | None] = None,
    search: FromQuery[str | None] = None,
    sort: FromQuery[str | None] = None,
    order: FromQuery[str | None] = None,
    limit: FromQuery[int | None] = None,
    offset: FromQuery[int | None] = None,
) -> Response[bytes]:
    """List the stored keys without their secrets, or with any parameter a page of all keys.

    `tenant` selects those of one. `search` is a part of the id or of the tenant's name, without case. `sort`
    is id, tenant, created, last_used or expires; `order` is asc or desc. Keys without such a time come last.
    `limit` is at most 1,000, and 50 without it.
    """
    reply: list[KeyInfo] | KeyPage
    if (tenant, search, sort, order, limit, offset) == (None,) * 6:
        with store_errors():
            tenants = {*admin.file_tenants, *await admin.store.tenants()}
            days = await admin.store.last_uses()
            reply = [
                key_info(key, has_tenant=key.tenant in tenants, last_used=days.get(key.id))
                for key in await admin.store.keys()
            ]
    else:
        reply = await _page(directory, paging_of(SORTS, sort, order, limit, offset), tenant, search or "")
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _page(directory: TenantDirectory, paging: Paging, tenant: str | None, search: str) -> KeyPage:
    wanted = folded(search.strip())
    found = [
        entry
        for entry in (await directory.current()).keys
        if tenant in {None, entry.key.tenant} and wanted in entry.searched
    ]
    days = await directory.last_uses() if paging.sort == "last_used" else {}
    keys: dict[str, Callable[[KeyEntry], Any]] = {
        "tenant": lambda entry: folded(entry.key.tenant),
        "created": lambda entry: entry.key.created_s or None,
        "expires": lambda entry: entry.key.expires_s,
        "last_used": lambda entry: days.get(entry.key.id) if entry.source == "store" else None,
    }
    part = paging.part(found, keys.get(paging.sort))
    days = days or await directory.last_uses([entry.key.id for entry in part])
    return KeyPage([listed_key(entry, days.get(entry.key.id)) for entry in part], len(found))


@post(
    "/admin/keys",
    dto=OnePass[KeyRequest],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(CreatedKey, description="The key, shown this once")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def create_key(
    data: JSONBody[KeyRequest],
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    api: NamedDependency[InferenceApi],
) -> CreatedKey:
    """Create a key.

    The reply is the only one that shows the key itself. This worker accepts the key at once, and all
    others within a second.
    """
    _check_id(data.id, api)
    tenant = api.gateway.keyring.tenant_settings.get(data.tenant)
    key = _new_key(data, operator, None if tenant is None else tenant.models)
    with store_errors():
        creation = await admin.store.create_key(key.stored, by=operator)
    if not creation.is_created:
        raise AlreadyExists(f"there is a key {key.stored.id!r} already", param="id")
    await admin.refresh()
    has_tenant = creation.has_tenant or data.tenant in admin.file_tenants
    notes = [] if has_tenant else [unknown_tenant_note(data.tenant)]
    named = dict.fromkeys((*(data.models or ()), *data.defaults.values()))
    notes += [f"model {name} is not served here" for name in named if name not in admin.models]
    notes += admin.budget_notes(data.limits)
    return CreatedKey(key.text, key_info(key.stored, has_tenant=has_tenant), notes)


def _check_id(id_: str | None, api: InferenceApi) -> None:
    """Check that records of the audit would not take a key for one of router.yaml. Raises: AlreadyExists."""
    if id_ in api.gateway.keyring.operator_ids:
        raise AlreadyExists(f"router.yaml has an operator's key {id_!r}; choose another id", param="id")


def _new_key(data: KeyRequest, by: Actor, tenant_models: Collection[str] | None) -> NewKey:
    """Create the key that an operator's request describes. Raises: InvalidInput."""
    check_limits(data.limits)
    expires = _parse_time(data.expires)
    try:
        return make_key(
            data.tenant,
            data.id,
            expires=expires,
            scopes=data.scopes,
            models=data.models,
            limits=data.limits,
            defaults=data.defaults,
            tenant_models=tenant_models,
            created_by=by.name,
        )
    except InvalidKeySettings as error:
        raise InvalidInput(str(error), param=error.field) from error


@delete(
    "/admin/keys/{key_id:str}",
    status_code=200,
    responses=REMOVED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def revoke_key(
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    key_id: FromPath[str],
) -> Response[bytes]:
    """Revoke a key.

    Every gateway rejects it within a second.
    """
    with store_errors():
        is_kept = admin.keeps_key(key_id)
        if not await admin.store.revoke(key_id, by=operator, is_kept=is_kept) and not is_kept:
            raise NotFound(f"there is no key {key_id!r}")
    await admin.refresh()
    return Response(b"{}", media_type="application/json")


@post(
    "/admin/keys/{key_id:str}/rotate",
    dto=OnePass[RotateRequest],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(RotatedKey, description="The successor, shown this once")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def rotate_key(
    data: JSONBody[RotateRequest],
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    api: NamedDependency[InferenceApi],
    key_id: FromPath[str],
) -> RotatedKey:
    """Replace a key by one that may do the same.

    The old key ends after the overlap. A key that expires is succeeded by one that lives as long.
    """
    _check_id(data.id, api)
    try:
        overlap_s, secret = duration_s(data.overlap), new_secret(data.id)
    except InvalidKeySettings as error:
        raise InvalidInput(str(error), param=error.field) from error
    except ValueError as error:
        raise InvalidInput(f"overlap: {error}", param="overlap") from error
    try:
        with store_errors():
            rotation = await admin.store.rotate_key(
                key_id, lambda key: succeed(key, secret, overlap_s, operator.name), by=operator
            )
    except KeyExists as error:
        raise AlreadyExists(str(error), param="id") from error
    except CannotRotate as error:
        raise InvalidInput(str(error)) from error
    if rotation is None:
        raise NotFound(f"there is no key {key_id!r}")
    await admin.refresh()
    with store_errors():
        has_tenant = rotation.after.tenant in {*admin.file_tenants, *await admin.store.tenants()}
    return RotatedKey(
        secret[1],
        key_info(rotation.successor, has_tenant=has_tenant),
        key_info(rotation.after, has_tenant=has_tenant),
    )


def _parse_time(text: str | None) -> datetime | None:
    """Parse the time of `expires`.

    Raises: InvalidInput.
    """
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            "expires: a day such as 2027-01-31, or a moment such as 2027-01-31T12:00:00Z", param="expires"
        ) from error


HANDLERS = [list_keys, create_key, rotate_key, revoke_key]
