"""`gateway usage`: settled usage of one tenant, or of all, by model and day, or of a month.

It is read from Redis, or asked of a running gateway: of the one that is named, and where there is no Redis.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TypeAlias
from urllib.parse import urlencode

import msgspec
from rich.table import Table

from gateway.audit.records import command_actor, new_record
from gateway.audit.redis_store import AuditInRedis
from gateway.cli.context import MEMORY, TIMEOUT_S, add_store_options, show_config_problems, store_config
from gateway.cli.gateway_client import GatewayClient
from gateway.cli.operator_options import add_admin_address_options, ask_gateway, named_url
from gateway.cli.output import print_result, show_line, show_table, write_document
from gateway.config.problems import ConfigError, count_of
from gateway.config.schema import Config
from gateway.errors import GatewayError
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.quotas.usage import (
    MonthUsage,
    UsageBy,
    UsageRow,
    as_csv,
    cells,
    columns_of,
    days_between,
    days_of_month,
    first_of_month,
    month_csv,
    month_table,
    month_usage,
)
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.end_users import names_of
from gateway.tenants.keyring import FIRST_TENANT
from gateway.tenants.store import TenantStore

# A year of many tenants is many reads of the gateway's store.
ASKED_S = 60.0


Remote: TypeAlias = Callable[[argparse.Namespace, Mapping[str, str]], int]
Stored: TypeAlias = Callable[[Config, argparse.Namespace, date | None], Coroutine[None, None, None]]


class Forgotten(msgspec.Struct):
    """Reply to a deletion. days: of which there were rows."""

    days: int


class DayUsage(msgspec.Struct):
    """Rows as the gateway returns them, or as they were read from Redis."""

    data: list[UsageRow]
    currency: str | None = None


def add_usage_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway usage` to its parser."""
    add_store_options(parser)
    add_admin_address_options(parser)
    parser.add_argument("tenant", nargs="?", help="tenant (default: all)")
    parser.add_argument("--since", type=_day, metavar="DAY", help="2027-01-31 (default: today)")
    parser.add_argument("--until", type=_day, metavar="DAY", help="the last day (default: today)")
    text = "2027-01: its days added up, with totals, and a forecast if it is the current one"
    parser.add_argument("--month", help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", const="json", dest="form", help="for scripts")
    form.add_argument("--csv", action="store_const", const="csv", dest="form", help="for spreadsheets")
    form.add_argument("--form", choices=["table", "json", "csv"], default="table", help="the same, older")
    parser.add_argument(
        "--by",
        choices=["model", "key", "end_user"],
        default="model",
        help="a row for each model, or for each model and key or end user",
    )
    forget = parser.add_argument_group("gateway usage forget: delete the usage of an end user")
    forget.add_argument("--tenant", dest="owner", metavar="TENANT", help="whose end user it is")
    forget.add_argument(
        "--end-user", metavar="NAME", help="as requests state it, or the digest that logs and usage show"
    )


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no day such as 2027-01-31") from error


def run_usage(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the usage, or delete an end user's; return 1 if that fails, or the days are not a period.

    2 for a wrong command line.
    """
    if options.end_user is not None or options.owner is not None:
        if options.tenant != "forget" or not options.end_user or not options.owner:
            show_line("to delete the usage of an end user: gateway usage forget --tenant T --end-user U")
            return 2
        return _run(options, environment, _forget_there, _forget)
    return _run(options, environment, _ask, _show_stored)


def _run(options: argparse.Namespace, environment: Mapping[str, str], ask: Remote, act: Stored) -> int:
    """Ask a running gateway, or act on the Redis of the config; return 1 if neither can."""
    if options.month is not None and (options.since or options.until):
        show_line("pass --month, or --since and --until")
        return 1
    try:
        first = None if options.month is None else first_of_month(options.month)
        days_between(options.since, options.until)
        if options.store is None and named_url(options, environment):
            return ask(options, environment)
        config = store_config(options, environment)
        if config.quotas.store == MEMORY:
            return ask(options, environment)
        asyncio.run(act(config, options, first))
    except ConfigError as error:
        show_config_problems(options, error)
        return 1
    except StoreUnavailable as error:
        show_line(f"the store of tenants and keys is unavailable: {error}")
        return 1
    except GatewayError as error:
        show_line(str(error))
        return 1
    return 0


async def _show_stored(config: Config, options: argparse.Namespace, first: date | None) -> None:
    _show(await _read(config, options, first), options.form, options.by)


async def _forget(config: Config, options: argparse.Namespace, _: date | None) -> None:
    """Delete the usage of an end user in Redis. Raises: GatewayError."""
    redis = RedisClient(config.quotas.store, TIMEOUT_S)
    ledger = _ledger(redis)
    try:
        names = names_of(options.owner, options.end_user)
        days = await ledger.forget_end_user(options.owner, names)
        # Without the name, which is to be forgotten.
        record = new_record(command_actor(), "forget", f"tenant/{options.owner}")
        await AuditInRedis(redis, config.audit).append([record])
        _show_forgotten(days, options.form)
    finally:
        await ledger.aclose()


def _forget_there(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Have a running gateway delete the usage of an end user; return 1 if it does not."""
    content = {"tenant": options.owner, "end_user": options.end_user}

    def forget(client: GatewayClient, _: str) -> None:
        _show_forgotten(client.post("/admin/usage/forget", content, Forgotten).days, options.form)

    return ask_gateway(options, environment, forget, ASKED_S)


def _show_forgotten(days: int, form: str) -> None:
    text = f"deleted the usage of {count_of(range(days), 'day')}; the totals of the tenant stay"
    print_result(Forgotten(days), text, as_json=form == "json")


def _ledger(redis: RedisClient) -> RedisLedger:
    return RedisLedger(redis, OutagePolicy(), "command line", lambda _: None)


def _ask(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the usage as a running gateway returns it; return 1 if it does not."""
    query = {
        "tenant": options.tenant,
        "since": options.since,
        "until": options.until,
        "month": options.month,
        "by": options.by,
    }
    path = f"/admin/usage?{urlencode({name: value for name, value in query.items() if value is not None})}"

    def show(client: GatewayClient, _: str) -> None:
        is_month = options.month is not None
        found = client.get(path, MonthUsage) if is_month else client.get(path, DayUsage)
        _show(found, options.form, options.by)

    return ask_gateway(options, environment, show, ASKED_S)


async def _read(config: Config, options: argparse.Namespace, first: date | None) -> DayUsage | MonthUsage:
    """Return the usage of a tenant, or of all if none is named. Raises: GatewayError, StoreUnavailable."""
    redis, now = RedisClient(config.quotas.store, TIMEOUT_S), datetime.now(UTC)
    ledger = _ledger(redis)
    days = days_between(options.since, options.until) if first is None else days_of_month(first, now)
    try:
        tenants = (
            [options.tenant] if options.tenant is not None else await _all_tenants(config, TenantStore(redis))
        )
        rows = [row for name in tenants for row in await ledger.usage(name, days, options.by)]
    finally:
        await ledger.aclose()
    if first is None:
        return DayUsage(rows, config.currency)
    return month_usage(first, now, rows, config.currency)


async def _all_tenants(config: Config, store: TenantStore) -> list[str]:
    """Return the tenants of the file, of Redis, of stored keys, and of the first key."""
    return sorted({*config.tenants, *await store.names(), FIRST_TENANT})


def _sheet(found: DayUsage | MonthUsage, by: UsageBy) -> bytes:
    return month_csv(found, by) if isinstance(found, MonthUsage) else as_csv(found.data, found.currency, by)


def _show(found: DayUsage | MonthUsage, form: str, by: UsageBy) -> None:
    match form:
        case "csv":
            write_document(_sheet(found, by).decode())
        case "json":
            print(msgspec.json.encode(found if isinstance(found, MonthUsage) else found.data).decode())
        case _:
            columns: Sequence[str]
            if isinstance(found, MonthUsage):
                columns, rows = month_table(found, by)
            else:
                columns = columns_of(by)
                rows = [cells(row, columns) for row in found.data]
            money = "" if found.currency is None else f" ({found.currency})"
            names = (f"{column}{money}" if column.endswith("cost") else column for column in columns)
            table = Table(*names, box=None)
            for row in rows:
                table.add_row(*map(str, row))
            show_table(table)
