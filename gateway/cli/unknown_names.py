"""Warnings about tenants and models that a command names and that do not exist. The command still runs."""

from collections.abc import Collection, Iterable

from gateway.additions.store import AdditionsInRedis
from gateway.cli.context import Context
from gateway.cli.output import show_line
from gateway.store.errors import StoreUnavailable
from gateway.tenants.names import unknown_tenant_note


async def warn_of_unknown_tenant(context: Context, tenant: str) -> None:
    """Warn if a tenant is defined nowhere. Raises: StoreUnavailable."""
    if tenant in context.config.tenants:
        return
    if context.store is None:
        show_line(f"tenant {tenant} is not in router.yaml yet")
    elif tenant not in await context.store.tenants():
        show_line(unknown_tenant_note(tenant))


async def warn_of_unknown_models(context: Context, names: Iterable[str]) -> None:
    """Warn of each model that is defined nowhere.

    Additions in a gateway's own memory cannot be seen from here. Without Redis, only the file counts.
    """
    missing = [name for name in dict.fromkeys(names) if name not in context.config.models]
    if not missing:
        return
    added = await _added_models(context)
    where = "not in router.yaml" if context.redis is None else "neither in router.yaml nor added"
    for name in missing:
        if name not in added:
            show_line(f"model {name} is {where}: there may be nothing to call by that name")


async def _added_models(context: Context) -> Collection[str]:
    """Return the models that operators added in Redis, or none if they cannot be read."""
    if context.redis is None:
        return ()
    try:
        return (await AdditionsInRedis(context.redis).load()).additions.models
    except StoreUnavailable:
        return ()
