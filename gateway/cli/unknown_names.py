"""Warnings of commands on keys and tenants: unknown models, idle budgets, the end of the first key."""

from collections.abc import Collection, Iterable

from gateway.additions.store import AdditionsInRedis
from gateway.cli.context import Context
from gateway.cli.output import show_line
from gateway.config.money import is_budget
from gateway.store.errors import StoreUnavailable
from gateway.tenants.keyring import FIRST_KEY_NOTE, NO_PRICE_NOTE


def warn_of_first_key_end(context: Context, *, is_first: bool) -> None:
    """Warn if a change ends the first key, which outlives tenants where there is no Redis.

    is_first: there was no tenant in the store before.
    """
    if is_first and context.file is None and not context.config.tenants:
        show_line(FIRST_KEY_NOTE)


def warn_of_idle_budgets(context: Context, *limits: Iterable[str]) -> None:
    """Warn if limits contain a budget and no model can have a price. Without a file nothing is known."""
    if context.options.store is not None or context.config.currency is not None:
        return
    if any(is_budget(name) for names in limits for name in names):
        show_line(NO_PRICE_NOTE)


async def warn_of_unknown_models(context: Context, names: Iterable[str]) -> None:
    """Warn of each model that is defined nowhere.

    Additions in a gateway's own memory cannot be seen from here. Without Redis, only the file counts; without
    a file, nothing is known.
    """
    if context.options.store is not None:
        return
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
