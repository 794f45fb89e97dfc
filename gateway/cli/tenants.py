"""`gateway tenants set | list | remove`: tenants in Redis, or in the file of a gateway without it."""

import argparse
from collections.abc import Mapping

import msgspec
from rich.table import Table

from gateway.cli.context import Action, Context, run_action
from gateway.cli.limits import format_limits, parse_limits
from gateway.cli.output import show_line, show_table
from gateway.cli.unknown_names import warn_of_first_key_end, warn_of_idle_budgets, warn_of_unknown_models
from gateway.config.schema import LimitAmount, TenantConfig
from gateway.tenants.names import name_problem


def tenants(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the chosen action; return 1 if the store, config or tenant does not exist, or a limit is wrong."""
    actions: dict[str, Action] = {"set": _set, "list": _list, "remove": _remove}
    return run_action(actions[options.action], options, environment)


async def _set(context: Context) -> int:
    if context.store is None:
        _show_only_in_file(context)
        return 1
    tenant = context.options.tenant
    try:
        settings = _settings(context.options)
    except ValueError as error:
        show_line(str(error))
        return 1
    is_first = await context.store.put_tenant(tenant, settings)
    await warn_of_unknown_models(context, [*(settings.models or ()), *settings.model_limits])
    warn_of_idle_budgets(context, settings.limits, *settings.model_limits.values())
    if tenant in context.config.tenants:
        show_line(f"{tenant} is set, but router.yaml also defines it and takes precedence")
    else:
        print(f"{tenant} is set; {context.followed}")
    warn_of_first_key_end(context, is_first=is_first)
    return 0


def _show_only_in_file(context: Context) -> None:
    show_line(f"tenants of router.yaml are changed there; {context.no_store}")


def _settings(options: argparse.Namespace) -> TenantConfig:
    """Return the settings that the options describe. Raises: ValueError with the problem."""
    if problem := name_problem(options.tenant):
        raise ValueError(problem)
    model_limits: dict[str, dict[str, LimitAmount]] = {}
    for text in options.model_limit or ():
        model, _, limit = text.rpartition(":")
        if not model:
            raise ValueError(f"{text}: expected MODEL:NAME=AMOUNT, such as bge:tokens_per_minute=100000")
        model_limits.setdefault(model, {}).update(parse_limits([limit]))
    plain = {
        "models": options.model,
        "limits": parse_limits(options.limit or ()),
        "model_limits": model_limits,
        "weight": options.weight,
        "priority": options.priority,
        "queue_tokens": options.queue_tokens,
        "join": not options.no_join,
    }
    return msgspec.convert(plain, TenantConfig)


async def _list(context: Context) -> int:
    if context.store is None:
        _show_only_in_file(context)
        return 1
    stored = await context.store.tenants()
    if context.options.json:
        print(msgspec.json.encode(stored).decode())
        return 0
    table = Table("tenant", "models", "limits", "weight", "priority", box=None)
    for name, tenant in stored.items():
        limits = format_limits(tenant.limits)
        for model, model_limits in tenant.model_limits.items():
            limits += format_limits(model_limits, f"{model}:")
        models = "all" if tenant.models is None else " ".join(tenant.models)
        label = f"{name} (router.yaml's counts)" if name in context.config.tenants else name
        table.add_row(label, models, " ".join(limits) or "none", str(tenant.weight), tenant.priority)
    show_table(table)
    return 0


async def _remove(context: Context) -> int:
    if context.store is None:
        _show_only_in_file(context)
        return 1
    tenant = context.options.tenant
    is_in_file = tenant in context.config.tenants
    if not await context.store.remove_tenant(tenant):
        where = (
            f" in {context.file or 'Redis'}; router.yaml defines it: change it there" if is_in_file else ""
        )
        show_line(f"there is no tenant {tenant}{where}")
        return 1
    print(f"removed {tenant} and its keys; {context.followed}")
    if is_in_file:
        show_line(f"router.yaml also defines {tenant}; it stays valid there, with the keys in the file")
    return 0
