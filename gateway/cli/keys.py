"""`gateway keys create | list | revoke`: keys in Redis, or a line to paste into router.yaml."""

import argparse
import time
from collections.abc import Mapping

import msgspec
from rich.table import Table

from gateway.cli.limits import limits_of, shown_limits
from gateway.cli.store import Action, run_with_store, show_line, show_table
from gateway.cli.unknown import show_unknown_models, show_unknown_tenant
from gateway.tenants.create_key import InvalidKeySettings, KeySettings, NewKey, make_key
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import TenantStore


def keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 when done; 1 where the store, the config or the id is not there."""
    actions: dict[str, Action] = {"create": _create, "list": _list, "revoke": _revoke}
    return run_with_store(actions[arguments.action], arguments, environment)


async def _create(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    try:
        key = _new_key(arguments)
    except ValueError as error:
        show_line(str(error))
        return 1
    await show_unknown_models(arguments, arguments.model or ())
    if store is None:
        await show_unknown_tenant(store, arguments)
        print(
            f"{key.text}\n\n# in router.yaml, below tenants.{arguments.tenant}.keys; "
            "the key itself is shown once:"
        )
        print(_line(key.stored))
        return 0
    if await store.has_key(key.stored.id):
        show_line(f"there is a key {key.stored.id} already; revoke it first, or choose another id")
        return 1
    # Before the key stands: once it does, nothing may come between it and who must see it.
    await show_unknown_tenant(store, arguments)
    await store.put(key.stored)
    print(key.text)
    return 0


def _new_key(arguments: argparse.Namespace) -> NewKey:
    """Create the key that the arguments describe. Raises: ValueError with the problem."""
    settings = KeySettings(
        arguments.tenant,
        arguments.id,
        arguments.expires,
        arguments.scope,
        arguments.model,
        limits_of(arguments.limit or ()),
    )
    try:
        return make_key(settings, arguments.in_file)
    except InvalidKeySettings as error:
        option = "tenant" if error.field == "tenant" else f"--{error.field}"
        raise ValueError(f"{option}: {error.problem}") from error


def _line(key: StoredKey) -> str:
    """A key as router.yaml lists it, with all that it is bound to."""
    told = [f'digest: "{key.digest}"', f"id: {msgspec.json.encode(key.id).decode()}"]
    if key.expires_s is not None:
        told.append(time.strftime('expires: "%Y-%m-%dT%H:%M:%SZ"', time.gmtime(key.expires_s)))
    for name, bound in (("scopes", key.scopes), ("models", key.models), ("limits", key.limits or None)):
        if bound is not None:
            told.append(f"{name}: {msgspec.json.encode(bound).decode()}")
    return f"- {{{', '.join(told)}}}"


async def _list(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    if store is None:
        show_line("keys of router.yaml are listed there; no other store is configured")
        return 1
    stored = await store.keys()
    if arguments.json:
        print(msgspec.json.encode(stored).decode())
        return 0
    table = Table("id", "tenant", "expires", "scopes", "models", "limits", box=None)
    for key in stored:
        expires = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.expires_s)) if key.expires_s else "never"
        scopes, models = " ".join(key.scopes or ("all operations",)), " ".join(key.models or ("all",))
        limits = " ".join(shown_limits(key.limits)) or "its tenant's"
        table.add_row(key.id, key.tenant, expires, scopes, models, limits)
    show_table(table)
    return 0


async def _revoke(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    if store is None:
        show_line("keys of router.yaml are revoked there; no other store is configured")
        return 1
    known = await store.revoke(arguments.id)
    if not known:
        show_line(f"there is no key {arguments.id}")
        return 1
    print(f"revoked {arguments.id}; every gateway refuses it within a second")
    return 0
