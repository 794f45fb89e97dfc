"""The context of commands on keys and tenants: options, config, and the store of tenants."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from gateway.cli.check import show_problems
from gateway.cli.output import show_line
from gateway.config.load import load_config, parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.config.yaml_parser import format_yaml
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.store import TenantStore

# Longer than a request's timeout, because a person waits.
TIMEOUT_S = 5.0
# A person at a terminal has the address of the store, but not all variables of the gateway's environment. Of
# other sections only the names are used, which a mistake in an entry does not change.
STORE_SECTIONS = ("quotas",)


class Context(msgspec.Struct, frozen=True):
    """Input of one action. redis, store: None if tenants and keys are only in router.yaml."""

    options: argparse.Namespace
    config: Config
    redis: RedisClient | None
    store: TenantStore | None


Action: TypeAlias = Callable[[Context], Awaitable[int]]


def add_store_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that find the store, and return the parser."""
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        default=Path("router.yaml"),
        metavar="FILE",
        help="the configuration (default: router.yaml)",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="the Redis, without a configuration; '${NAME}' is filled from the environment",
    )
    return parser


def store_config(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the config, of which at least the store is valid. Raises: ConfigError."""
    if options.store is None:
        return load_config(options.config, environment, STORE_SECTIONS)
    text = format_yaml({"quotas": {"store": options.store}})
    return parse_config(text, environment, Path.cwd(), STORE_SECTIONS)


def show_config_problems(options: argparse.Namespace, error: ConfigError) -> None:
    """Print the problems of the file or of the option that names the store."""
    show_problems(options.config if options.store is None else Path("--store"), error)


def run_action(action: Action, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action with an open store; return its status, or 1 if the config or the store is unusable."""
    try:
        config = store_config(options, environment)
    except ConfigError as error:
        show_config_problems(options, error)
        return 1
    try:
        return asyncio.run(_run(action, options, config))
    except StoreUnavailable as error:
        show_line(f"the store of tenants and keys is unavailable: {error}")
        return 1


async def _run(action: Action, options: argparse.Namespace, config: Config) -> int:
    if config.quotas.store == "memory":
        return await action(Context(options, config, None, None))
    redis = RedisClient(config.quotas.store, TIMEOUT_S)
    store = TenantStore(redis)
    try:
        return await action(Context(options, config, redis, store))
    finally:
        await store.aclose()
