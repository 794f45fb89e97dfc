"""`gateway keys create | list | revoke`: keys in Redis, or a line to paste into router.yaml."""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from rich.console import Console
from rich.table import Table

from gateway.cli.check import show_problems
from gateway.config import Config
from gateway.config_file import ConfigError, load_config
from gateway.quotas.redis_door import RedisDoor, StoreAway
from gateway.tenants.keyring import make_key
from gateway.tenants.store import KeyStore

# A person waits longer than a call does.
TIMEOUT_S = 5.0


def keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 when done; 1 where the store, the config or the id is not there."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        config = load_config(arguments.config, environment)
    except ConfigError as error:
        show_problems(arguments.config, error)
        return 1
    actions: dict[str, Callable[[Config, argparse.Namespace], Awaitable[int]]] = {
        "create": _create,
        "list": _list,
        "revoke": _revoke,
    }
    try:
        return asyncio.run(_awaited(actions[arguments.action](config, arguments)))
    except StoreAway as error:
        errors.print(f"[red]the store of keys is away[/]: {error}")
        return 1


async def _awaited(action: Awaitable[int]) -> int:
    return await action


def _store(config: Config) -> KeyStore | None:
    url = config.quotas.store
    return None if url == "memory" else KeyStore(RedisDoor(url, TIMEOUT_S))


async def _create(config: Config, arguments: argparse.Namespace) -> int:
    key, stored = make_key(
        arguments.tenant, arguments.id, arguments.expires, arguments.scope, arguments.model
    )
    store = _store(config)
    if store is None:
        print(
            f"{key}\n\n# in router.yaml, below tenants.{arguments.tenant}.keys; the key itself is shown once:"
        )
        print(f'- {{digest: "{stored.digest}", id: {stored.id}}}')
        return 0
    if any(one.id == stored.id for one in await store.all()):
        Console(stderr=True).print(
            f"there is a key {stored.id} already; revoke it first, or choose another id"
        )
        return 1
    await store.put(stored)
    await store.aclose()
    print(key)
    return 0


async def _list(config: Config, arguments: argparse.Namespace) -> int:
    store = _store(config)
    stored = [] if store is None else await store.all()
    if store is not None:
        await store.aclose()
    if arguments.json:
        print(msgspec.json.encode(stored).decode())
        return 0
    table = Table("id", "tenant", "expires", "scopes", "models", box=None)
    for key in stored:
        expires = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.expires_s)) if key.expires_s else "never"
        scopes, models = " ".join(key.scopes or ("all operations",)), " ".join(key.models or ("all",))
        table.add_row(key.id, key.tenant, expires, scopes, models)
    Console().print(table)
    return 0


async def _revoke(config: Config, arguments: argparse.Namespace) -> int:
    store = _store(config)
    if store is None:
        Console(stderr=True).print("keys of router.yaml are revoked there; no other store is configured")
        return 1
    known = await store.revoke(arguments.id)
    await store.aclose()
    if not known:
        Console(stderr=True).print(f"there is no key {arguments.id}")
        return 1
    print(f"revoked {arguments.id}; every gateway refuses it within a second")
    return 0
