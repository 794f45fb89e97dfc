"""`gateway usage`: what a tenant used by model and day, as the quotas settled it."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from gateway.cli.check import show_problems
from gateway.cli.store import TIMEOUT_S, show_line, show_table
from gateway.config_file import ConfigError, load_config
from gateway.errors import GatewayError
from gateway.quotas.redis_door import RedisDoor
from gateway.quotas.redis_ledger import RedisLedger, Rules
from gateway.quotas.usage import USAGE_COLUMNS, UsageRow, as_csv, days_between


def usage(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 when shown; 1 where the store or the config is not there, or the days make no sense."""
    try:
        config = load_config(arguments.config, environment)
    except ConfigError as error:
        show_problems(arguments.config, error)
        return 1
    if config.quotas.store == "memory":
        show_line("usage is counted in the gateway's memory here: ask it at /admin/usage")
        return 1
    try:
        days = days_between(arguments.since, arguments.until)
        rows = asyncio.run(_read(config.quotas.store, arguments.tenant, days))
    except GatewayError as error:
        show_line(str(error))
        return 1
    _show(rows, arguments.form)
    return 0


async def _read(url: str, tenant: str, days: Sequence[str]) -> list[UsageRow]:
    ledger = RedisLedger(RedisDoor(url, TIMEOUT_S), Rules(), "command line", lambda _: None)
    try:
        return await ledger.usage(tenant, days)
    finally:
        await ledger.aclose()


def _show(rows: Sequence[UsageRow], form: str) -> None:
    match form:
        case "csv":
            print(as_csv(rows).decode(), end="")
        case "json":
            print(msgspec.json.encode(rows).decode())
        case _:
            table = Table(*USAGE_COLUMNS, box=None)
            for row in rows:
                table.add_row(*(str(getattr(row, column)) for column in USAGE_COLUMNS))
            show_table(table)
