"""Operator endpoints for stored tenants: in Redis, or in a file. API keys need the scope admin."""

from itertools import chain
from typing import Any, Literal

import msgspec
from litestar import Response, delete, get, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.operators.access import OPERATORS, REMOVED, check_limits, store_errors
from gateway.api.operators.admin import Admin
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.audit.records import Actor, ChangedField
from gateway.config import schema as config
from gateway.config.certificate_entries import entries_problem
from gateway.errors import InvalidInput, NotFound
from gateway.quotas.ledger import remaining_budgets
from gateway.tenants.create_key import name_problem
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import merged

FAILURES = document_errors(TEI)


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

    in_file: router.yaml defines the name too, and the file wins. notes: warnings that the first key ends,
    that nothing is spent from a budget, or that client certificates are not verified.
    """

    name: str
    settings: TenantSettings
    in_file: bool
    notes: list[str] = []


class ChangedTenant(StoredTenant):
    """A stored tenant after a change.

    changes: the settings that differ, each with what it was and what it is; null stands for one that is not
    set. A limit is a setting of its own, as in `limits.tokens_per_day`.
    """

    changes: list[ChangedField] = []


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


@get("/admin/tenants", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_tenants(
    admin: NamedDependency[Admin],
) -> list[StoredTenant]:
    """List the stored tenants."""
    with store_errors():
        tenants = await admin.store.tenants()
    return [
        StoredTenant(name, settings_of(tenant), in_file=name in admin.file_tenants)
        for name, tenant in tenants.items()
    ]


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
    name: FromPath[str],
    replace: FromQuery[bool] = False,  # noqa: FBT002 - a parameter of the query
) -> ChangedTenant:
    """Add a tenant, or change its settings.

    What the body does not name stays as it is, and null removes a setting or a limit. With `replace`, what is
    not named is removed. Every gateway applies the settings within a second.
    """
    if problem := name_problem(name):
        raise InvalidInput(problem)
    patch = patch_of(data)
    if entries := patch.get("certificates"):
        with store_errors():
            admin.check_certificates(name, entries, await admin.store.tenants())
    with store_errors():
        changed = await admin.store.change_tenant(
            name, lambda before: merged(None if replace else before, patch), by=operator
        )
    await admin.refresh()
    notes = admin.first_key_notes(is_first=changed.is_first)
    settings = settings_of(changed.after)
    notes += admin.budget_notes(settings.limits, settings.end_user_limits, *settings.model_limits.values())
    notes += admin.certificate_notes(settings.certificates)
    return ChangedTenant(name, settings, name in admin.file_tenants, notes, changed.changes)


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
    name: FromPath[str],
) -> Response[bytes]:
    """Remove a tenant and its keys.

    Every gateway rejects the keys within a second.
    """
    with store_errors():
        if not await admin.store.remove_tenant(name, by=operator):
            raise NotFound(f"there is no tenant {name!r}")
    await admin.refresh()
    return Response(b"{}", media_type="application/json")


def settings_of(tenant: config.TenantConfig) -> TenantSettings:
    """Return the settings of a stored tenant, without its keys."""
    return msgspec.convert(
        {name: value for name, value in msgspec.to_builtins(tenant).items() if name != "keys"}, TenantSettings
    )


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


HANDLERS = [list_limits, list_tenants, put_tenant, remove_tenant]
