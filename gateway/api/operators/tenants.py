"""Operator endpoints for stored tenants: in Redis, or in a file. API keys need the scope admin."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import msgspec
from litestar import Response, delete, get, patch, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.operators.access import OPERATORS, REMOVED, check_limits, store_errors
from gateway.api.operators.admin import Admin
from gateway.api.operators.conditions import condition_of
from gateway.api.operators.directory import SORTS, TenantDirectory, TenantPage
from gateway.api.operators.pages import check_choice, paging_of
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import HttpContext
from gateway.audit.records import Actor, ChangedField
from gateway.config import schema as config
from gateway.config.certificate_entries import entries_problem
from gateway.errors import InvalidInput, NotFound
from gateway.quotas.ledger import remaining_budgets
from gateway.tenants.create_key import name_problem
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import SettingsChange, merged, tag_of

FAILURES = document_errors(TEI)
SOURCES = ("store", "file")


class TenantSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a stored tenant, with the fields of router.yaml.

    Its keys are created one by one, at /admin/keys.
    """

    models: list[str] | None = None
    limits: dict[str, config.LimitAmount] = {}
    model_limits: dict[str, dict[str, config.LimitAmount]] = {}
    end_user_limits: dict[str, config.LimitAmount] = {}
    weight: config.PositiveInt = 1
    priority: Literal["interactive", "bulk"] = "interactive"
    queue_tokens: config.PositiveInt | None = None
    join: bool = True
    certificates: list[str] = []


class TenantPatch(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a stored tenant to change.

    What is absent stays as it is, and so do limits that are not named. null removes a setting or a limit.
    """

    models: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    limits: dict[str, config.LimitAmount | None] | msgspec.UnsetType | None = msgspec.UNSET
    model_limits: dict[str, dict[str, config.LimitAmount | None] | None] | msgspec.UnsetType | None = (
        msgspec.UNSET
    )
    end_user_limits: dict[str, config.LimitAmount | None] | msgspec.UnsetType | None = msgspec.UNSET
    weight: config.PositiveInt | msgspec.UnsetType | None = msgspec.UNSET
    priority: Literal["interactive", "bulk"] | msgspec.UnsetType | None = msgspec.UNSET
    queue_tokens: config.PositiveInt | msgspec.UnsetType | None = msgspec.UNSET
    join: bool | msgspec.UnsetType | None = msgspec.UNSET
    certificates: list[str] | msgspec.UnsetType | None = msgspec.UNSET


class StoredTenant(msgspec.Struct):
    """A stored tenant.

    in_file: router.yaml defines the name too, and the file wins. etag: of the settings, for `if-match`.
    notes: warnings that the first key ends, that nothing is spent from a budget, or that client certificates
    are not verified.
    """

    name: str
    settings: TenantSettings
    in_file: bool
    etag: str
    notes: list[str] = []


class ChangedTenant(StoredTenant):
    """A stored tenant after a change.

    changes: the settings that differ, each with what it was and what it is; null stands for one that is not
    set. A limit is a setting of its own, as in `limits.tokens_per_day`.
    """

    changes: list[ChangedField] = []


Tagged = TypeVar("Tagged", bound=StoredTenant)


class TenantLimits(msgspec.Struct):
    """A tenant of router.yaml or of the store, as its calls meet it.

    in_file: router.yaml defines it. model_limits: by model. remaining: what is left of each budget in its
    period, by the name of the limit; empty while the quota store is away.
    """

    name: str
    in_file: bool
    models: list[str] | None
    limits: dict[str, config.LimitAmount]
    model_limits: dict[str, dict[str, config.LimitAmount]]
    weight: int
    priority: Literal["interactive", "bulk"]
    remaining: dict[str, float]


@get("/admin/limits", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_limits(
    admin: NamedDependency[Admin], api: NamedDependency[InferenceApi]
) -> list[TenantLimits]:
    """List all tenants with their limits and what is left of their budgets, those of router.yaml too."""
    keyring, found = api.gateway.keyring, []
    # Before the first wait, in which a tenant could be removed.
    owners = [
        (name, settings, keyring.owner_of(StoredKey("", "", name)))
        for name, settings in sorted(keyring.tenant_settings.items())
    ]
    for name, settings, owner in owners:
        limits = chain(owner.for_batches().limits, *owner.model_limits.values())
        with store_errors():
            remaining = await remaining_budgets(admin.ledger, name, limits)
        found.append(
            TenantLimits(
                name,
                name in admin.file_tenants,
                None if settings.models is None else list(settings.models),
                settings.limits,
                settings.model_limits,
                settings.weight,
                settings.priority,
                remaining,
            )
        )
    return found


@get(
    "/admin/tenants",
    responses={
        200: ResponseSpec(
            cast("type[msgspec.Struct]", list[StoredTenant] | TenantPage),
            generate_examples=False,
            description="The stored tenants; with a parameter, a page of all tenants",
        )
    }
    | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def list_tenants(
    admin: NamedDependency[Admin],
    directory: NamedDependency[TenantDirectory],
    search: FromQuery[str | None] = None,
    sort: FromQuery[str | None] = None,
    order: FromQuery[str | None] = None,
    limit: FromQuery[int | None] = None,
    offset: FromQuery[int | None] = None,
    source: FromQuery[str | None] = None,
) -> Response[bytes]:
    """List the stored tenants, or with any parameter a page of all tenants with their usage.

    `search` is a part of the name or of a key's id, without case. `sort` is name, keys, last_used, or today's
    calls, tokens, cost or refused; `order` is asc or desc. `limit` is at most 1,000, and 50 without it.
    `source` selects those of router.yaml (`file`) or stored ones (`store`).
    """
    reply: list[StoredTenant] | TenantPage
    if (search, sort, order, limit, offset, source) == (None,) * 6:
        with store_errors():
            tenants = await admin.store.tenants()
        reply = [
            StoredTenant(name, settings_of(tenant), name in admin.file_tenants, tag_of(tenant))
            for name, tenant in tenants.items()
        ]
    else:
        if source is not None:
            check_choice("source", source, SOURCES)
        reply = await directory.page(paging_of(SORTS, sort, order, limit, offset), search or "", source)
    return Response(msgspec.json.encode(reply), media_type="application/json")


@get(
    "/admin/tenants/{name:str}",
    responses={200: ResponseSpec(StoredTenant, description="The tenant; its header `etag` is for `if-match`")}
    | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def get_tenant(admin: NamedDependency[Admin], name: FromPath[str]) -> Response[StoredTenant]:
    """Return a stored tenant."""
    with store_errors():
        tenant = (await admin.store.tenants()).get(name)
    if tenant is None:
        raise NotFound(f"there is no stored tenant {name!r}")
    return _tagged(StoredTenant(name, settings_of(tenant), name in admin.file_tenants, tag_of(tenant)))


@put(
    "/admin/tenants/{name:str}",
    dto=OnePass[TenantPatch],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(ChangedTenant, description="The tenant with its new settings")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def put_tenant(
    data: JSONBody[TenantPatch],
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    context: NamedDependency[HttpContext],
    name: FromPath[str],
    replace: FromQuery[bool] = False,  # noqa: FBT002 - a parameter of the query
) -> Response[ChangedTenant]:
    """Add a tenant, or change its settings.

    What the body does not name stays as it is, and null removes a setting or a limit. With `replace`, what is
    not named is removed. Every gateway applies the settings within a second. `if-match` with the tenant's
    etag changes no other state of it, and `if-none-match: *` only adds one.
    """
    if problem := name_problem(name):
        raise InvalidInput(problem)
    fields, condition = patch_of(data), condition_of(context, may_be_new=True)

    def change(before: config.TenantConfig | None) -> config.TenantConfig:
        condition.check(f"the tenant {name!r}", None if before is None else tag_of(before))
        return merged(None if replace else before, fields)

    await _check_certificates(admin, name, fields)
    return await _change(admin, name, change, operator)


@patch(
    "/admin/tenants/{name:str}",
    dto=OnePass[TenantPatch],
    return_dto=None,
    responses={200: ResponseSpec(ChangedTenant, description="The tenant with its new settings")} | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def patch_tenant(
    data: JSONBody[TenantPatch],
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    context: NamedDependency[HttpContext],
    name: FromPath[str],
) -> Response[ChangedTenant]:
    """Change settings of a stored tenant.

    As PUT, but it adds none: the body is a JSON merge patch (RFC 7396) of the settings.
    """
    fields, condition = patch_of(data), condition_of(context)

    def change(before: config.TenantConfig | None) -> config.TenantConfig:
        if before is None:
            raise NotFound(f"there is no stored tenant {name!r}")
        condition.check(f"the tenant {name!r}", tag_of(before))
        return merged(before, fields)

    await _check_certificates(admin, name, fields)
    return await _change(admin, name, change, operator)


async def _check_certificates(admin: Admin, name: str, fields: Mapping[str, Any]) -> None:
    """Check that no other tenant lists the client certificates of a patch. Raises: InvalidInput."""
    if entries := fields.get("certificates"):
        with store_errors():
            admin.check_certificates(name, entries, await admin.store.tenants())


async def _change(
    admin: Admin, name: str, change: SettingsChange, operator: Actor
) -> Response[ChangedTenant]:
    with store_errors():
        changed = await admin.store.change_tenant(name, change, by=operator)
    await admin.refresh()
    notes = admin.first_key_notes(is_first=changed.is_first)
    settings = settings_of(changed.after)
    notes += admin.budget_notes(settings.limits, settings.end_user_limits, *settings.model_limits.values())
    notes += admin.certificate_notes(settings.certificates)
    tag = tag_of(changed.after)
    return _tagged(
        ChangedTenant(name, settings, name in admin.file_tenants, tag, notes, changes=changed.changes)
    )


def _tagged(tenant: Tagged) -> Response[Tagged]:
    """Return a reply with the tag of a tenant."""
    return Response(tenant, headers={"etag": tenant.etag})


@delete(
    "/admin/tenants/{name:str}",
    status_code=200,
    responses=REMOVED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def remove_tenant(
    admin: NamedDependency[Admin],
    operator: NamedDependency[Actor],
    context: NamedDependency[HttpContext],
    name: FromPath[str],
) -> Response[bytes]:
    """Remove a tenant and its keys.

    Every gateway rejects the keys within a second. `if-match` with the tenant's etag removes no other state
    of it.
    """
    condition = condition_of(context)

    def check(settings: config.TenantConfig | None) -> None:
        if settings is None:
            # There may be keys of the name, which the operator has not seen.
            raise NotFound(f"there is no stored tenant {name!r}")
        condition.check(f"the tenant {name!r}", tag_of(settings))

    with store_errors():
        if not await admin.store.remove_tenant(name, by=operator, check=check if condition.is_set else None):
            raise NotFound(f"there is no tenant {name!r}")
    await admin.refresh()
    return Response(b"{}", media_type="application/json")


def settings_of(tenant: config.TenantConfig) -> TenantSettings:
    """Return the settings of a stored tenant, without its keys."""
    fields = msgspec.to_builtins(tenant)
    return msgspec.convert({name: fields[name] for name in TenantSettings.__struct_fields__}, TenantSettings)


def patch_of(settings: TenantPatch) -> dict[str, Any]:
    """Return the fields to change.

    Raises: InvalidInput if the name of a limit is unknown, or if an entry cannot identify a certificate.
    """
    patch: dict[str, Any] = msgspec.to_builtins(settings)
    if problem := entries_problem(patch.get("certificates") or ()):
        raise InvalidInput(problem, param="certificates")
    for limits in (patch.get("limits"), *(patch.get("model_limits") or {}).values()):
        check_limits({name: amount for name, amount in (limits or {}).items() if amount is not None})
    of_users = patch.get("end_user_limits") or {}
    named = {name: amount for name, amount in of_users.items() if amount is not None}
    for name, problem in config.end_user_limit_problems(named).items():
        raise InvalidInput(f"{name}: {problem}", param="end_user_limits")
    return patch


HANDLERS = [list_limits, list_tenants, get_tenant, put_tenant, patch_tenant, remove_tenant]
