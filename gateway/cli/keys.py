"""`gateway keys create | list | rotate | revoke`: keys in Redis or a file, or lines for router.yaml."""

import argparse
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, get_args

import msgspec
from rich.table import Table

from gateway.cli.context import (
    Action,
    Context,
    add_store_options,
    find_lost_tenants,
    format_limits,
    parse_limits,
    run_action,
    show_lost_tenants,
    warn_of_first_key_end,
    warn_of_idle_budgets,
    warn_of_unknown_models,
)
from gateway.cli.operator_options import add_json_option
from gateway.cli.output import NONE, print_json, print_result, show_line, show_table
from gateway.config.durations import duration_s
from gateway.config.schema import DEFAULTS, Scope, TenantConfig
from gateway.tenants.create_key import InvalidKeySettings, NewKey, make_key, new_secret, succeed
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.keyring import StoredKey, unknown_tenant_note
from gateway.tenants.store import TenantStore


def add_keys_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway keys` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    create = add_store_options(actions.add_parser("create", help="create a key and print it once"))
    create.add_argument("tenant", help="tenant that is billed and limited")
    create.add_argument("--id", help="name in lists and for `revoke` (default: random)")
    create.add_argument("--expires", type=_moment, metavar="DATE", help="2027-01-31, or with a time; UTC")
    create.add_argument(
        "--scope",
        action="append",
        choices=get_args(Scope),
        metavar="SCOPE",
        help=f"{', '.join(get_args(Scope))}; may be repeated",
    )
    create.add_argument("--model", action="append", help="the only model it may use; may be repeated")
    create.add_argument(
        "--limit",
        action="append",
        metavar="NAME=AMOUNT",
        help="tokens_per_minute=1000, in addition to its tenant's limits; may be repeated",
    )
    create.add_argument(
        "--default",
        action="append",
        type=_default,
        metavar="OPERATION=MODEL",
        help=f"model of requests that name none: {', '.join(DEFAULTS)}; may be repeated",
    )
    create.add_argument("--new-tenant", action="store_true", help="also create the tenant, without limits")
    create.add_argument("--yaml", action="store_true", help="store nothing; print a line for router.yaml")
    add_json_option(create)
    listing = add_store_options(actions.add_parser("list", help="all keys, without their secrets"))
    add_json_option(listing)
    rotate = add_store_options(
        actions.add_parser("rotate", help="replace a key by one that may do the same, and print it once")
    )
    rotate.add_argument("id", help="as `list` shows it")
    rotate.add_argument(
        "--overlap",
        type=_overlap,
        default="24h",
        metavar="TIME",
        help="time for which the old key stays valid, such as 90m or 7d (default: 24h)",
    )
    rotate.add_argument("--new-id", metavar="ID", help="id of the successor (default: random)")
    revoke = add_store_options(
        actions.add_parser("revoke", help="revoke a key; every gateway rejects it within a second")
    )
    revoke.add_argument("id", help="as `list` shows it")
    for action in (rotate, revoke):
        add_json_option(action)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        expected = "a day such as 2027-01-31, nor a moment such as 2027-01-31T12:00:00Z"
        raise argparse.ArgumentTypeError(f"{text!r} is neither {expected}") from error


def _default(text: str) -> tuple[str, str]:
    operation, _, model = text.partition("=")
    if operation not in DEFAULTS or not model:
        expected = f"OPERATION=MODEL, with one of: {', '.join(DEFAULTS)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return operation, model


def _overlap(text: str) -> int:
    try:
        return duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_keys(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the chosen action; return 1 if the store, the config or the key's id does not exist."""
    actions: dict[str, Action] = {"create": _create, "list": _list, "rotate": _rotate, "revoke": _revoke}
    return run_action(actions[options.action], options, environment)


async def _create(context: Context) -> int:
    options, store = context.options, context.store
    tenant: TenantConfig | None = context.config.tenants.get(options.tenant)
    if tenant is None and store is not None and options.default:
        tenant = (await store.tenants()).get(options.tenant)
    try:
        key = _new_key(context, tenant)
    except ValueError as error:
        show_line(str(error))
        return 1
    await warn_of_unknown_models(context, (*(options.model or ()), *key.stored.defaults.values()))
    if store is None or options.yaml:
        _show_line_of_key(context, key)
        return 0
    if not await _has_tenant(context, store):
        return 1
    creation = await store.create_key(key.stored, by=context.by)
    if not creation.is_created:
        show_line(f"there is a key {key.stored.id} already; revoke it first, or choose another id")
        return 1
    print_result({"key": key.text, "is_stored": True, **_fields(key.stored)}, key.text, as_json=options.json)
    if context.file is not None:
        show_line(context.followed)
    if not creation.has_tenant and options.store is not None:
        show_line(unknown_tenant_note(options.tenant))
    warn_of_idle_budgets(context, key.stored.limits)
    return 0


async def _has_tenant(context: Context, store: TenantStore | FileTenantStore) -> bool:
    """Return whether the key has a tenant, which is created if the options ask for it."""
    options = context.options
    if options.new_tenant:
        lost = await find_lost_tenants(context)
        changed = await store.change_tenant(
            options.tenant, lambda before: before or TenantConfig(), by=context.by
        )
        is_first = changed.is_first and not lost.has_ended_first_key
        warn_of_first_key_end(context, is_first=is_first)
        return True
    # Without a file it is not known which tenants that has.
    is_known = options.store is not None or options.tenant in context.config.tenants
    if is_known or options.tenant in await store.tenants():
        return True
    show_line(
        f"there is no tenant {options.tenant}, and its keys would be refused: add --new-tenant, or run "
        f"`gateway tenants set {options.tenant}` first"
    )
    return False


def _show_line_of_key(context: Context, key: NewKey) -> None:
    """Print a key that is not stored, and the line of router.yaml that makes it valid."""
    tenant, line = context.options.tenant, _yaml_line(key.stored)
    if tenant not in context.config.tenants:
        show_line(f"tenant {tenant} is not in router.yaml yet")
    reason = "" if context.store is not None else f": {context.no_store}"
    show_line(f"THE KEY IS NOT VALID YET{reason}")
    show_line(f"write the printed line below tenants.{tenant}.keys in router.yaml, and reload it")
    text = (
        f"{key.text}\n\n# in router.yaml, below tenants.{tenant}.keys; the key itself is shown once:\n{line}"
    )
    fields = {"key": key.text, "is_stored": False, "yaml": line, **_fields(key.stored)}
    print_result(fields, text, as_json=context.options.json)


def _new_key(context: Context, tenant: TenantConfig | None) -> NewKey:
    """Create the key that the options describe. tenant: its settings. Raises: ValueError with the problem."""
    options = context.options
    limits = parse_limits(options.limit or ())
    try:
        return make_key(
            options.tenant,
            options.id,
            expires=options.expires,
            scopes=options.scope,
            models=options.model,
            limits=limits,
            defaults=dict(options.default or ()),
            tenant_models=None if tenant is None else tenant.models,
            created_by=context.by.name,
            configured_tenants=context.config.tenants,
        )
    except InvalidKeySettings as error:
        option = "tenant" if error.field == "tenant" else f"--{error.field}"
        raise ValueError(f"{option}: {error.problem}") from error


def _yaml_line(key: StoredKey) -> str:
    """Return the key with all its restrictions, as an entry of a list in router.yaml."""
    fields = [f'digest: "{key.digest}"', f"id: {msgspec.json.encode(key.id).decode()}"]
    if key.expires_s is not None:
        fields.append(time.strftime('expires: "%Y-%m-%dT%H:%M:%SZ"', time.gmtime(key.expires_s)))
    settings = {"scopes": key.scopes, "models": key.models, "limits": key.limits or None}
    for name, value in (settings | {"defaults": key.defaults or None}).items():
        if value is not None:
            fields.append(f"{name}: {msgspec.json.encode(value).decode()}")
    return f"- {{{', '.join(fields)}}}"


async def _list(context: Context) -> int:
    if context.store is None:
        show_line(f"keys of router.yaml are listed there; {context.no_store}")
        return 1
    stored = await context.store.keys()
    tenants = {*context.config.tenants, *await context.store.tenants()}
    await show_lost_tenants(context)
    days = await context.store.last_uses()
    if context.options.json:
        print_json([_fields(key, days.get(key.id)) for key in stored])
        return 0
    columns = (
        "id",
        "tenant",
        "created",
        "by",
        "last used",
        "expires",
        "scopes",
        "models",
        "limits",
        "defaults",
    )
    table = Table(*columns, box=None)
    for key in stored:
        expires = _minute(key.expires_s) if key.expires_s else "never"
        if key.successor:
            expires += f" (then {key.successor})"
        scopes, models = " ".join(key.scopes or ("all operations",)), " ".join(key.models or ("all",))
        limits = " ".join(format_limits(key.limits)) or "its tenant's"
        tenant = key.tenant if key.tenant in tenants else f"{key.tenant} (not defined: refused)"
        created = _minute(key.created_s) if key.created_s else NONE
        used = days.get(key.id, "never")
        defaults = " ".join(f"{operation}={model}" for operation, model in key.defaults.items()) or NONE
        row = (
            key.id,
            tenant,
            created,
            key.created_by or NONE,
            used,
            expires,
            scopes,
            models,
            limits,
            defaults,
        )
        table.add_row(*row)
    show_table(table)
    return 0


def _fields(key: StoredKey, last_used: str | None = None) -> dict[str, Any]:
    return {**msgspec.to_builtins(key), "last_used": last_used}


def _minute(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at_s))


async def _rotate(context: Context) -> int:
    if context.store is None:
        show_line(f"keys of router.yaml are replaced there; {context.no_store}")
        return 1
    options = context.options
    try:
        secret = new_secret(options.new_id)
        rotation = await context.store.rotate_key(
            options.id, lambda key: succeed(key, secret, options.overlap, context.by.name), by=context.by
        )
    except ValueError as error:
        show_line(str(error))
        return 1
    if rotation is None:
        show_line(f"there is no key {options.id}")
        return 1
    replaced = {"id": options.id, "expires_s": rotation.after.expires_s}
    fields = {"key": secret[1], "replaces": replaced, **_fields(rotation.successor)}
    print_result(fields, secret[1], as_json=options.json)
    ends = _minute(rotation.after.expires_s or 0)
    show_line(f"{rotation.successor.id} replaces {options.id}, which ends at {ends} UTC; {context.followed}")
    return 0


async def _revoke(context: Context) -> int:
    if context.store is None:
        show_line(f"keys of router.yaml are revoked there; {context.no_store}")
        return 1
    key_id = context.options.id
    if not await context.store.revoke(key_id, by=context.by):
        show_line(
            f"there is no key {key_id}; gateways that keep it after a loss of data refuse it from now on"
        )
        return 1
    print_result({"revoked": key_id}, f"revoked {key_id}; {context.followed}", as_json=context.options.json)
    return 0
