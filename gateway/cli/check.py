"""`gateway check`: report the problems of a router.yaml without starting or contacting anything."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.markup import escape

from gateway.cli.first_key import NO_OPERATOR_KEY, needs_operator_key
from gateway.cli.operator_options import add_config_option
from gateway.cli.output import CleanConsole, count_of, show_problems
from gateway.config.load import load_config
from gateway.config.notes import notes
from gateway.config.problems import ConfigError


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway check` to its parser."""
    add_config_option(parser)


def check_command(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `gateway check`."""
    return check(options.config, environment)


def check(path: Path, environment: Mapping[str, str]) -> int:
    """Print a summary and return 0 if the file can be used; otherwise print its problems and return 1."""
    console = CleanConsole(soft_wrap=True, emoji=False)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    console.print(
        f"[green]{escape(str(path))} is fine[/]: {count_of(config.models, 'model')} on "
        f"{count_of(config.upstreams, 'upstream')}, {count_of(config.tenants, 'tenant')}"
    )
    for note in notes(config):
        console.print(f"  [bold]{escape(note.path)}[/]: {escape(note.message)}")
    # Keys in Redis are not read here.
    if config.tenants and config.quotas.store == "memory" and needs_operator_key(config):
        console.print(f"  [bold]admin.keys[/]: {NO_OPERATOR_KEY}")
    return 0
