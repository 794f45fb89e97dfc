"""`gateway serve`: load the config, make the first key where none is, start, and say how to call it."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from gateway.cli.banner import FirstKey, show_banner
from gateway.cli.check import show_problems
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.processes.reload_queue import Source
from gateway.processes.supervisor import StartError, Supervisor
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.telemetry.log_lines import write_lines
from gateway.tenants.create_key import random_key
from gateway.tenants.keyring import key_digest
from gateway.tenants.store import TenantStore

logger = logging.getLogger("gateway")

STORE_TIMEOUT_S = 5.0


def serve(path: Path, environment: Mapping[str, str]) -> int:
    """Run until stopped; 1 where it could not start."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    write_lines(config.logs)
    first_key = _first_key(config, environment, errors)
    try:
        asyncio.run(_run(config, Source(path, environment), first_key))
    except StartError as error:
        errors.print(f"[red]cannot start[/]: {escape(str(error))}")
        return 1
    return 0


def _first_key(config: Config, environment: Mapping[str, str], errors: Console) -> FirstKey | None:
    """There is no open mode: without tenants one key stands in, given or made; None where there are others.

    Where Redis cannot tell, none is made: it might let in a stranger. A given one waits for what Redis holds.
    """
    if config.tenants:
        return None
    given = environment.get("GATEWAY_API_KEY")
    try:
        if config.quotas.store != "memory" and asyncio.run(_holds_any(config.quotas.store)):
            return None
    except StoreUnavailable as error:
        told = "until it is back calls are refused" if given else "no key is made; calls are refused"
        errors.print(f"[yellow]Redis is away[/] ({escape(str(error))}): {told}")
        return FirstKey(given, made=False, waits=True) if given else None
    return FirstKey(given, made=False) if given else FirstKey(random_key(), made=True)


async def _holds_any(url: str) -> bool:
    """Whether tenants or keys stand in Redis. Raises: StoreUnavailable."""
    store = TenantStore(RedisClient(url, STORE_TIMEOUT_S))
    try:
        return await store.holds_any()
    finally:
        await store.aclose()


async def _run(config: Config, source: Source, first_key: FirstKey | None) -> None:
    # Standard error, so that what is piped from standard output is the banner alone.
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def progress(detail: str) -> None:
            status.update(escape(detail))
            if not console.is_terminal:
                logger.info("%s", detail)

        def ready(report: bytes, address: str) -> None:
            status.stop()
            # rich ends what writes to nobody; a gateway serves whether or not anybody reads its banner.
            with suppress(BrokenPipeError, SystemExit):
                show_banner(msgspec.json.decode(report), address, first_key)

        digest = key_digest(first_key.key) if first_key else None
        waits = first_key is not None and first_key.waits
        await Supervisor(config, source, digest, progress, ready, first_key_waits=waits).run()
