"""`gateway tenants set | list | remove`: tenants in Redis, which every gateway follows."""

import argparse
from collections.abc import Mapping

import msgspec
from rich.table import Table

from gateway.cli.limits import limits_of, shown_limits
from gateway.cli.store import Action, run_with_store, show_line, show_table
from gateway.cli.unknown import show_unknown_models
from gateway.config.schema import TenantConfig
from gateway.tenants.names import name_problem
from gateway.tenants.store import TenantStore

NO_STORE = "tenants of router.yaml are changed there; no other store is configured"


def tenants(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 when done; 1 where the store, the config or the tenant is not there, or a limit is none."""
    actions: dict[str, Action] = {"set": _set, "list": _list, "remove": _remove}
    return run_with_store(actions[arguments.action], arguments, environment)


async def _set(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    if store is None:
        show_line(NO_STORE)
        return 1
    try:
        settings = _settings(arguments)
    except ValueError as error:
        show_line(str(error))
        return 1
    await store.put_tenant(arguments.tenant, settings)
    await show_unknown_models(arguments, [*(settings.models or ()), *settings.model_limits])
    if arguments.tenant in arguments.in_file:
        show_line(f"{arguments.tenant} is set, but router.yaml has it too, and that one counts")
    else:
        print(f"{arguments.tenant} is set; every gateway follows within a second")
    return 0


def _settings(arguments: argparse.Namespace) -> TenantConfig:
    """Raises: ValueError with what is wrong."""
    if problem := name_problem(arguments.tenant):
        raise ValueError(problem)
    model_limits: dict[str, dict[str, int]] = {}
    for written in arguments.model_limit or ():
        model, _, limit = written.rpartition(":")
        if not model:
            raise ValueError(f"{written}: expected MODEL:NAME=AMOUNT, such as bge:tokens_per_minute=100000")
        model_limits.setdefault(model, {}).update(limits_of([limit]))
    plain = {
        "models": arguments.model,
        "limits": limits_of(arguments.limit or ()),
        "model_limits": model_limits,
        "weight": arguments.weight,
        "priority": arguments.priority,
        "queue_tokens": arguments.queue_tokens,
        "join": not arguments.no_join,
    }
    return msgspec.convert(plain, TenantConfig)


async def _list(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    if store is None:
        show_line(NO_STORE)
        return 1
    stored = await store.tenants()
    if arguments.json:
        print(msgspec.json.encode(stored).decode())
        return 0
    table = Table("tenant", "models", "limits", "weight", "priority", box=None)
    for name, one in stored.items():
        limits = shown_limits(one.limits)
        for model, own in one.model_limits.items():
            limits += shown_limits(own, f"{model}:")
        models = "all" if one.models is None else " ".join(one.models)
        shown = f"{name} (router.yaml's counts)" if name in arguments.in_file else name
        table.add_row(shown, models, " ".join(limits) or "none", str(one.weight), one.priority)
    show_table(table)
    return 0


async def _remove(store: TenantStore | None, arguments: argparse.Namespace) -> int:
    if store is None:
        show_line(NO_STORE)
        return 1
    is_in_file = arguments.tenant in arguments.in_file
    if not await store.remove_tenant(arguments.tenant):
        where = " in Redis; router.yaml has it, and is changed there" if is_in_file else ""
        show_line(f"there is no tenant {arguments.tenant}{where}")
        return 1
    print(f"removed {arguments.tenant} and its keys; every gateway follows within a second")
    if is_in_file:
        show_line(
            f"router.yaml has {arguments.tenant} too, and that one goes on, with the keys that stand there"
        )
    return 0
