"""`gateway serve`: load the config, make the first key where none is, start, and say how to call it."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from gateway.cli.banner import FirstKey, show_banner
from gateway.cli.check import show_problems
from gateway.config import Config
from gateway.config_file import ConfigError, load_config
from gateway.quotas.redis_door import RedisDoor, StoreAway
from gateway.supervisor import StartError, Supervisor
from gateway.tenants.keyring import key_digest, new_key
from gateway.tenants.store import TenantStore

STORE_TIMEOUT_S = 5.0


def serve(path: Path, environment: Mapping[str, str]) -> int:
    """Run until stopped; 1 where it could not start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
    )
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    first_key = None if config.tenants or _has_stored_tenants(config, errors) else _first_key(environment)
    try:
        asyncio.run(_run(config, first_key, environment))
    except StartError as error:
        errors.print(f"[red]cannot start[/]: {escape(str(error))}")
        return 1
    return 0


def _has_stored_tenants(config: Config, errors: Console) -> bool:
    """Whether tenants or keys stand in Redis. Untold, no key is made: it might let in a stranger."""
    if config.quotas.store == "memory":
        return False

    async def look() -> bool:
        store = TenantStore(RedisDoor(config.quotas.store, STORE_TIMEOUT_S))
        try:
            return await store.holds_any()
        except StoreAway as error:
            errors.print(
                f"[yellow]Redis is away[/] ({escape(str(error))}): no key is made; calls are refused"
            )
            return True
        finally:
            await store.aclose()

    return asyncio.run(look())


def _first_key(environment: Mapping[str, str]) -> FirstKey:
    """There is no open mode: without tenants one key stands in, given or made."""
    given = environment.get("GATEWAY_API_KEY")
    return FirstKey(given, made=False) if given else FirstKey(new_key(), made=True)


async def _run(config: Config, first_key: FirstKey | None, environment: Mapping[str, str]) -> None:
    # Standard error, so that what is piped from standard output is the banner alone.
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def progress(detail: str) -> None:
            status.update(escape(detail))
            if not console.is_terminal:
                console.print(escape(detail))

        def ready(report: bytes, address: str) -> None:
            status.stop()
            show_banner(msgspec.json.decode(report), address, first_key)

        digest = key_digest(first_key.key) if first_key else None
        await Supervisor(config, digest, environment, progress, ready).run()
