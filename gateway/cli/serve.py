"""`gateway serve`: load the config, create the first key if there is none, start, and print the banner."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gateway.cli.banner import FirstKey, show_banner
from gateway.cli.check import show_problems
from gateway.config.boot import AppBoot
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.processes.config_source import ConfigSource
from gateway.processes.messages import WorkerReady
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
    """Run the gateway until it is stopped; return 1 if it cannot start."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    write_lines(config.logs)
    first_key = _first_key(config, environment, errors)
    try:
        asyncio.run(_run(config, ConfigSource(path, environment), first_key))
    except StartError as error:
        errors.print(f"[red]cannot start[/]: {escape(str(error))}")
        return 1
    return 0


def _first_key(config: Config, environment: Mapping[str, str], errors: Console) -> FirstKey | None:
    """Return the key that is used while there are no tenants, or None if there are any.

    There is no open mode: the key is taken from the environment or created. If Redis is unavailable, none is
    created, because it might bypass tenants in Redis. A key from the environment then waits until
    Redis has reported that it contains none.
    """
    if config.tenants:
        return None
    configured = environment.get("GATEWAY_API_KEY")
    try:
        if config.quotas.store != "memory" and asyncio.run(_holds_any(config.quotas.store)):
            return None
    except StoreUnavailable as error:
        effect = "calls are refused for now" if configured else "no key is created; calls are refused"
        errors.print(f"[yellow]Redis is unavailable[/] ({escape(str(error))}): {effect}")
        return FirstKey(configured, is_new=False, waits=True) if configured else None
    return FirstKey(configured, is_new=False) if configured else FirstKey(random_key(), is_new=True)


async def _holds_any(url: str) -> bool:
    """Return True if Redis contains tenants or keys. Raises: StoreUnavailable."""
    store = TenantStore(RedisClient(url, STORE_TIMEOUT_S))
    try:
        return await store.holds_any()
    finally:
        await store.aclose()


async def _run(config: Config, source: ConfigSource, first_key: FirstKey | None) -> None:
    # Progress goes to standard error, so that standard output carries only the banner.
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def show_progress(detail: str) -> None:
            status.update(escape(detail))
            if not console.is_terminal:
                logger.info("%s", detail)

        def on_ready(report: WorkerReady, address: str) -> None:
            status.stop()
            # rich exits on a closed pipe, but the gateway serves even if its banner cannot be written.
            with suppress(BrokenPipeError, SystemExit):
                show_banner(report.models, address, first_key)

        boot = AppBoot(
            config,
            first_key_digest=key_digest(first_key.key) if first_key else None,
            first_key_waits=first_key is not None and first_key.waits,
        )
        await Supervisor(boot, source, show_progress, on_ready).run()
