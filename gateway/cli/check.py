"""`gateway check`: report the problems of a router.yaml without starting or contacting anything."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.markup import escape

from gateway.cli.first_key import NO_OPERATOR_KEY, needs_operator_key
from gateway.cli.operator_options import add_config_option, add_json_option
from gateway.cli.output import CleanConsole, count_of, print_json, show_problems
from gateway.config.host_users import people
from gateway.config.load import load_config
from gateway.config.notes import notes
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config


class CheckReport(msgspec.Struct):
    """Result for scripts. is_usable: there is no problem."""

    file: str
    is_usable: bool
    problems: Sequence[Problem] = ()
    notes: Sequence[Problem] = ()
    models: int = 0
    upstreams: int = 0
    tenants: int = 0


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway check` to its parser."""
    add_json_option(add_config_option(parser))


def check_command(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `gateway check`."""
    return check(options.config, environment, as_json=options.json)


def check(path: Path, environment: Mapping[str, str], *, as_json: bool = False) -> int:
    """Print a summary and return 0 if the file can be used; otherwise print its problems and return 1."""
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        if as_json:
            print_json(CheckReport(str(path), is_usable=False, problems=error.problems))
        else:
            show_problems(path, error)
        return 1
    found = list(_notes(config))
    if as_json:
        print_json(
            CheckReport(
                str(path),
                is_usable=True,
                notes=found,
                models=len(config.models),
                upstreams=len(config.upstreams),
                tenants=len(config.tenants),
            )
        )
        return 0
    console = CleanConsole(soft_wrap=True, emoji=False)
    console.print(
        f"[green]{escape(str(path))} is fine[/]: {count_of(config.models, 'model')} on "
        f"{count_of(config.upstreams, 'upstream')}, {count_of(config.tenants, 'tenant')}"
    )
    for note in found:
        console.print(f"  [bold]{escape(note.path)}[/]: {escape(note.message)}")
    return 0


def _notes(config: Config) -> list[Problem]:
    # Keys in Redis are not read here.
    lacks_key = config.tenants and config.quotas.store == "memory" and needs_operator_key(config, people())
    return [*notes(config), *([Problem("admin.keys", NO_OPERATOR_KEY)] if lacks_key else [])]
