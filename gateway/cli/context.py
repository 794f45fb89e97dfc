"""The context of commands on keys and tenants: options, config, and the store of tenants."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import msgspec

from gateway.cli.check import show_problems
from gateway.cli.output import show_line
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.store import TenantStore

# Longer than a request's timeout, because a person waits.
TIMEOUT_S = 5.0
# A person at a terminal has the address of the store, but not all variables of the gateway's environment.
STORE_SECTIONS = ("quotas", "tenants", "models")


class Context(msgspec.Struct, frozen=True):
    """Input of one action. redis, store: None if tenants and keys are only in router.yaml."""

    options: argparse.Namespace
    config: Config
    redis: RedisClient | None
    store: TenantStore | None


Action: TypeAlias = Callable[[Context], Awaitable[int]]


def run_action(action: Action, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action with an open store; return its status, or 1 if the config or the store is unusable."""
    try:
        config = load_config(options.config, environment, STORE_SECTIONS)
    except ConfigError as error:
        show_problems(options.config, error)
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
