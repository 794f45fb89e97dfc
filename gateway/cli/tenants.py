"""`gateway tenants set | list | remove`: tenants in Redis, or in the file of a gateway without it."""

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

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
    show_replaced,
    shown,
    warn_of_first_key_end,
    warn_of_idle_budgets,
    warn_of_unknown_models,
)
from gateway.cli.operator_options import add_json_option
from gateway.cli.output import print_json, print_result, show_line, show_table
from gateway.config.certificate_entries import entries_problem
from gateway.config.schema import LimitAmount, TenantConfig, end_user_limit_problems, limit_problems
from gateway.tenants.client_certificate import UNVERIFIED_NOTE, sharing_problem
from gateway.tenants.create_key import name_problem
from gateway.tenants.store import SettingsChange, TenantChange, merged

SETTINGS = (
    *("models", "limits", "model_limits", "end_user_limits"),
    *("weight", "priority", "queue_tokens", "join", "certificates"),
)


def add_tenants_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway tenants` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    setting = add_store_options(
        actions.add_parser("set", help="add a tenant, or change settings; those not named stay as they are")
    )
    setting.add_argument("tenant", help="its name")
    setting.add_argument("--model", action="append", help="the only model it may use; may be repeated")
    setting.add_argument(
        "--limit", action="append", metavar="NAME=AMOUNT", help="tokens_per_minute=100000; may be repeated"
    )
    setting.add_argument(
        "--model-limit",
        action="append",
        metavar="MODEL:NAME=AMOUNT",
        help="a limit for one model, instead of the model's own; may be repeated",
    )
    setting.add_argument(
        "--end-user-limit",
        action="append",
        metavar="NAME=AMOUNT",
        help="a limit for each of its end users, see `end_users` in router.yaml; may be repeated",
    )
    setting.add_argument("--weight", type=int, help="share of a busy model (default: 1)")
    setting.add_argument("--priority", choices=["interactive", "bulk"], help="default: interactive")
    setting.add_argument("--queue-tokens", type=int, help="most tokens that may wait for one model")
    setting.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help="its texts may share an upstream request with others' (default), or never do",
    )
    setting.add_argument(
        "--certificate",
        action="append",
        metavar="ENTRY",
        help="the only client certificate that stands for a key: dns:NAME, uri:URI or sha256:FINGERPRINT; "
        "may be repeated",
    )
    setting.add_argument(
        "--unset",
        action="append",
        metavar="FIELD",
        help="remove a setting: models, weight, priority, queue_tokens, join, certificates, limits, the name "
        "of a limit, model_limits, MODEL:NAME, or end_user_limits; may be repeated",
    )
    setting.add_argument("--replace", action="store_true", help="remove all settings that are not named")
    listing = add_store_options(actions.add_parser("list", help="all tenants that are not in router.yaml"))
    remove = add_store_options(actions.add_parser("remove", help="remove a tenant and its keys"))
    remove.add_argument("tenant", help="its name")
    for action in (setting, listing, remove):
        add_json_option(action)


def run_tenants(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the chosen action; return 1 if the store, config or tenant does not exist, or a limit is wrong."""
    actions: dict[str, Action] = {"set": _set, "list": _list, "remove": _remove}
    return run_action(actions[options.action], options, environment)


async def _set(context: Context) -> int:
    if context.store is None:
        _show_only_in_file(context)
        return 1
    tenant = context.options.tenant
    lost = await find_lost_tenants(context)
    try:
        await _check_certificates(context)
        changed = await context.store.change_tenant(tenant, _change(context.options), by=context.by)
    except ValueError as error:
        show_line(str(error))
        return 1
    settings = changed.after
    await warn_of_unknown_models(context, [*(settings.models or ()), *settings.model_limits])
    warn_of_idle_budgets(context, settings.limits, *settings.model_limits.values())
    _warn_of_unverified_clients(context, settings)
    if tenant in context.config.tenants:
        show_line(f"{tenant} is set, but router.yaml also defines it and takes precedence")
    elif not context.options.json:
        print(f"{tenant} is set; {context.followed}")
    before = None if context.options.replace else changed.before
    for name in _absent(context.options.unset or (), before or TenantConfig()):
        show_line(f"--unset {name}: it was not set")
    if context.options.json:
        print_json({"tenant": tenant, "changes": changed.changes, "settings": settings})
    else:
        _show_changes(changed)
    show_replaced(tenant, lost, changed)
    warn_of_first_key_end(context, is_first=changed.is_first and not lost.has_ended_first_key)
    return 0


def _show_changes(changed: TenantChange) -> None:
    for change in changed.changes:
        print(f"  {change.field}: {shown(change.was)} -> {shown(change.now)}")
    if not changed.changes and changed.before is not None:
        print("  nothing has changed")


async def _check_certificates(context: Context) -> None:
    """Check that the client certificates in the options can identify the tenant. Raises: ValueError."""
    options, entries = context.options, context.options.certificate or ()
    problem = entries_problem(entries)
    if entries and not problem and context.store is not None:
        problem = sharing_problem(options.tenant, entries, await context.store.tenants(), context.config)
    if problem:
        raise ValueError(f"--certificate {problem}")


def _warn_of_unverified_clients(context: Context, settings: TenantConfig) -> None:
    """Warn if the tenant has client certificates, and the gateway of the file verifies none."""
    if settings.certificates and context.options.store is None and not context.config.verifies_clients:
        show_line(UNVERIFIED_NOTE)


def _show_only_in_file(context: Context) -> None:
    show_line(f"tenants of router.yaml are changed there; {context.no_store}")


def _change(options: argparse.Namespace) -> SettingsChange:
    """Return the change that the options describe. Raises: ValueError, as the change does too."""
    patch = _patch(options)

    def change(before: TenantConfig | None) -> TenantConfig:
        known = None if options.replace else before
        return merged(known, _with_removals(patch, options.unset or (), known or TenantConfig()))

    return change


def _with_removals(patch: dict[str, Any], names: Sequence[str], known: TenantConfig) -> dict[str, Any]:
    """Return a patch that also removes settings and limits. Raises: ValueError if there is none of a name."""
    patch = copy.deepcopy(patch)
    for name in names:
        model, _, limit = name.rpartition(":")
        if name in SETTINGS:
            patch[name] = None
        elif model and _is_limit(limit):
            patch["model_limits"].setdefault(model, {}).setdefault(limit, None)
        elif _is_limit(name):
            patch["limits"].setdefault(name.removeprefix("limits."), None)
        else:
            there = ", ".join(_set_fields(known)) or "nothing"
            raise ValueError(f"--unset {name}: there is no such setting or limit; set is: {there}")
    return patch


def _is_limit(name: str) -> bool:
    return not limit_problems({name.removeprefix("limits."): 1})


def _set_fields(settings: TenantConfig) -> list[str]:
    """Return the names of the limits and settings that differ from those of a new tenant."""
    of_models = [f"{model}:{name}" for model, limits in settings.model_limits.items() for name in limits]
    new = TenantConfig()
    changed = [name for name in SETTINGS if getattr(settings, name) != getattr(new, name)]
    return [*settings.limits, *of_models, *changed]


def _absent(names: Sequence[str], known: TenantConfig) -> list[str]:
    """Return those of the names that a tenant has not set."""
    there = _set_fields(known)
    return [name for name in names if name.removeprefix("limits.") not in there]


def _patch(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the options name. Raises: ValueError with the problem."""
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
        "weight": options.weight,
        "priority": options.priority,
        "queue_tokens": options.queue_tokens,
        "join": options.join,
        "certificates": options.certificate,
    }
    named = {name: value for name, value in plain.items() if value is not None}
    of_users = parse_limits(options.end_user_limit or ())
    for name, problem in end_user_limit_problems(of_users).items():
        raise ValueError(f"{name}: {problem}")
    limits = {"limits": parse_limits(options.limit or ()), "model_limits": model_limits}
    return named | limits | ({"end_user_limits": of_users} if of_users else {})


async def _list(context: Context) -> int:
    if context.store is None:
        _show_only_in_file(context)
        return 1
    stored = await context.store.tenants()
    await show_lost_tenants(context)
    if context.options.json:
        print_json(stored)
        return 0
    table = Table("tenant", "models", "limits", "weight", "priority", box=None)
    for name, tenant in stored.items():
        limits = format_limits(tenant.limits)
        for model, model_limits in tenant.model_limits.items():
            limits += format_limits(model_limits, f"{model}:")
        limits += format_limits(tenant.end_user_limits, "each end user:")
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
    if not await context.store.remove_tenant(tenant, by=context.by):
        where = (
            f" in {context.file or 'Redis'}; router.yaml defines it: change it there" if is_in_file else ""
        )
        show_line(f"there is no tenant {tenant}{where}")
        return 1
    text = f"removed {tenant} and its keys; {context.followed}"
    print_result({"removed": tenant}, text, as_json=context.options.json)
    if is_in_file:
        show_line(f"router.yaml also defines {tenant}; it stays valid there, with the keys in the file")
    return 0
