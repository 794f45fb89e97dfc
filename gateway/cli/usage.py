"""`gateway usage`: show the settled usage of one tenant, or of all, by model and day."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from datetime import date

import msgspec
from rich.table import Table

from gateway.cli.context import TIMEOUT_S, add_store_options, show_config_problems, store_config
from gateway.cli.output import show_line, show_table, write_document
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.errors import GatewayError
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.quotas.usage import UsageRow, as_csv, cell, columns_of, days_between
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import FIRST_TENANT
from gateway.tenants.store import TenantStore


def add_usage_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway usage` to its parser."""
    add_store_options(parser)
    parser.add_argument("tenant", nargs="?", help="tenant (default: all)")
    parser.add_argument("--since", type=_day, metavar="DAY", help="2027-01-31 (default: today)")
    parser.add_argument("--until", type=_day, metavar="DAY", help="the last day (default: today)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", const="json", dest="form", help="for scripts")
    form.add_argument("--csv", action="store_const", const="csv", dest="form", help="for spreadsheets")
    form.add_argument("--form", choices=["table", "json", "csv"], default="table", help="the same, older")
    parser.add_argument(
        "--by",
        choices=["model", "key"],
        default="model",
        help="a row for each model, or for each model and key",
    )


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no day such as 2027-01-31") from error


def usage(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the usage; return 1 if the store or the config does not exist, or the days are not a period."""
    try:
        config = store_config(options, environment)
    except ConfigError as error:
        show_config_problems(options, error)
        return 1
    if config.quotas.store == "memory":
        show_line("usage is counted in the gateway's memory here: ask it at /admin/usage")
        return 1
    try:
        days = days_between(options.since, options.until)
        rows = asyncio.run(_read(config, options.tenant, days, by_key=options.by == "key"))
    except StoreUnavailable as error:
        show_line(f"the store of tenants and keys is unavailable: {error}")
        return 1
    except GatewayError as error:
        show_line(str(error))
        return 1
    _show(rows, options.form, config.currency, by_key=options.by == "key")
    return 0


async def _read(config: Config, tenant: str | None, days: Sequence[str], *, by_key: bool) -> list[UsageRow]:
    """Return the usage of a tenant, or of all if it is None. Raises: GatewayError, StoreUnavailable."""
    redis = RedisClient(config.quotas.store, TIMEOUT_S)
    ledger = RedisLedger(redis, OutagePolicy(), "command line", lambda _: None)
    try:
        tenants = [tenant] if tenant is not None else await _all_tenants(config, TenantStore(redis))
        return [row for name in tenants for row in await ledger.usage(name, days, by_key=by_key)]
    finally:
        await ledger.aclose()


async def _all_tenants(config: Config, store: TenantStore) -> list[str]:
    """Return the tenants of the file, of Redis, of stored keys, and of the first key."""
    return sorted({*config.tenants, *await store.names(), FIRST_TENANT})


def _show(rows: Sequence[UsageRow], form: str, currency: str | None, *, by_key: bool) -> None:
    match form:
        case "csv":
            write_document(as_csv(rows, by_key=by_key).decode())
        case "json":
            print(msgspec.json.encode(rows).decode())
        case _:
            columns = columns_of(by_key=by_key)
            money = "cost" if currency is None else f"cost ({currency})"
            table = Table(*(money if column == "cost" else column for column in columns), box=None)
            for row in rows:
                table.add_row(*(str(cell(row, column)) for column in columns))
            show_table(table)
