"""What commands on keys, tenants and usage share: the config's store, opened for one action."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from gateway.cli.check import show_problems
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.store import TenantStore

# A person waits longer than a call does.
TIMEOUT_S = 5.0
PIPE_WIDTH = 1000

# What a command does with the store; None where tenants and keys stand in router.yaml only.
Action: TypeAlias = Callable[[TenantStore | None, argparse.Namespace], Awaitable[int]]


def run_with_store(action: Action, arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """The action's exit status; 1 where the config cannot be used or the store is away."""
    try:
        config = load_config(arguments.config, environment)
    except ConfigError as error:
        show_problems(arguments.config, error)
        return 1
    # Which tenants the file has: what stands in Redis of them does not count.
    arguments.in_file, arguments.models_in_file = frozenset(config.tenants), frozenset(config.models)
    try:
        return asyncio.run(_run(action, config.quotas.store, arguments))
    except StoreUnavailable as error:
        show_line(f"the store of tenants and keys is away: {error}")
        return 1


def show_line(text: str) -> None:
    """One line for a person, on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def show_table(table: Table) -> None:
    """Nothing of it is cut or read as markup: cells fold on a terminal, and a pipe has no width."""
    for column in table.columns:
        column.overflow = "fold"
    width = None if Console().is_terminal else PIPE_WIDTH
    Console(width=width, markup=False, emoji=False).print(table)


async def _run(action: Action, url: str, arguments: argparse.Namespace) -> int:
    arguments.door = None if url == "memory" else RedisClient(url, TIMEOUT_S)
    if arguments.door is None:
        return await action(None, arguments)
    store = TenantStore(arguments.door)
    try:
        return await action(store, arguments)
    finally:
        await store.aclose()
