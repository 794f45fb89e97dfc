"""What a command names that is nowhere yet: the command works all the same, and says so, a line each."""

import argparse
from collections.abc import Collection, Iterable

from gateway.additions.store import AdditionsInRedis
from gateway.cli.store import show_line
from gateway.store.errors import StoreUnavailable
from gateway.tenants.names import unknown_tenant_note
from gateway.tenants.store import TenantStore


async def show_unknown_tenant(store: TenantStore | None, arguments: argparse.Namespace) -> None:
    """Say that nothing limits a tenant that was never set. Raises: StoreUnavailable."""
    tenant = arguments.tenant
    if tenant in arguments.in_file:
        return
    if store is None:
        show_line(f"tenant {tenant} is not in router.yaml yet")
    elif tenant not in await store.tenants():
        show_line(unknown_tenant_note(tenant))


async def show_unknown_models(arguments: argparse.Namespace, named: Iterable[str]) -> None:
    """Say which models nobody serves. Where additions are in a gateway's own memory, only the file tells."""
    missing = [name for name in dict.fromkeys(named) if name not in arguments.models_in_file]
    if not missing:
        return
    added = await _added(arguments)
    where = "not in router.yaml" if arguments.door is None else "neither in router.yaml nor added"
    for name in missing:
        if name not in added:
            show_line(f"model {name} is {where}: there may be nothing to call by that name")


async def _added(arguments: argparse.Namespace) -> Collection[str]:
    """Models that operators added in Redis; none where they cannot be read."""
    if arguments.door is None:
        return ()
    try:
        return (await AdditionsInRedis(arguments.door).load()).additions.models
    except StoreUnavailable:
        return ()
