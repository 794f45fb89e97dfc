"""`gateway serve`: load the config, create the first key if there is none, start, and print the banner."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gateway.cli.banner import show_banner
from gateway.cli.check import show_problems
from gateway.cli.first_key import FirstKey, first_key
from gateway.config.boot import AppBoot
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.processes.config_source import ConfigSource
from gateway.processes.messages import WorkerReady
from gateway.processes.supervisor import StartError, Supervisor
from gateway.telemetry.log_lines import write_lines

logger = logging.getLogger("gateway")


def serve(path: Path, environment: Mapping[str, str]) -> int:
    """Run the gateway until it is stopped; return 1 if it cannot start."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    write_lines(config.logs)
    key = first_key(config, environment, errors, is_terminal=sys.stdout.isatty())
    try:
        asyncio.run(_run(config, ConfigSource(path, environment), key))
    except StartError as error:
        errors.print(f"[red]cannot start[/]: {escape(str(error))}")
        return 1
    return 0


async def _run(config: Config, source: ConfigSource, key: FirstKey | None) -> None:
    def show_progress(detail: str) -> None:
        # A line of its own, on a terminal too: lines of other processes would break into a spinner.
        logger.info("%s", detail)

    def on_ready(report: WorkerReady, address: str) -> None:
        # rich exits on a closed pipe, but the gateway serves even if its banner cannot be written.
        with suppress(BrokenPipeError, SystemExit):
            show_banner(report.models, address, config.admin.listen, key)

    boot = AppBoot(
        config,
        first_key_digest=key.digest if key else None,
        first_key_waits=key is not None and key.waits,
    )
    show_progress("starting")
    await Supervisor(boot, source, show_progress, on_ready).run()
