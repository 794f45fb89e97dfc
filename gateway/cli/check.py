"""`gateway check`: report the problems of a router.yaml without starting anything.

It contacts nothing unless --live is given.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.markup import escape

from gateway.cli.first_key import NO_OPERATOR_KEY, needs_operator_key
from gateway.cli.operator_options import add_config_option, add_json_option, seconds
from gateway.cli.output import CleanConsole, print_json, show_line, show_problems
from gateway.config.host_users import people
from gateway.config.load import load_config, with_lines
from gateway.config.notes import notes
from gateway.config.problems import ConfigError, Problem, count_of
from gateway.config.schema import Config

# A reference text takes a CPU server a moment.
LIVE_TIMEOUT_S, LIVE_TIMEOUT_MAX_S = 10.0, 600.0


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
    parser.add_argument(
        "--live",
        action="store_true",
        help="also ask the store, replicas, issuers and tokenizers whether they are as the file says",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=LIVE_TIMEOUT_S,
        metavar="S",
        help="of each with --live (default: 10)",
    )


def run_check(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `gateway check`."""
    if not 0 < options.timeout <= LIVE_TIMEOUT_MAX_S:
        show_line(f"--timeout: more than 0 and at most {LIVE_TIMEOUT_MAX_S:g}, not {options.timeout:g}")
        return 2
    live_s = options.timeout if options.live else None
    return check(options.config, environment, as_json=options.json, live_s=live_s)


def check(
    path: Path, environment: Mapping[str, str], *, as_json: bool = False, live_s: float | None = None
) -> int:
    """Print a summary and return 0 if the file can be used; otherwise print its problems and return 1.

    live_s: time for each server that is asked, None to ask none.
    """
    try:
        config = load_config(path, environment)
        found = list(_notes(config))
        if live_s is not None:
            found += _check_live(config, path, environment, live_s)
    except ConfigError as error:
        if as_json:
            print_json(CheckReport(str(path), is_usable=False, problems=error.problems))
        else:
            show_problems(path, error)
        return 1
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


def _check_live(
    config: Config, path: Path, environment: Mapping[str, str], timeout_s: float
) -> list[Problem]:
    """Return notes on what the file refers to. Raises: ConfigError if something is not as it says."""
    # It loads the adapters of all backends.
    from gateway.cli.live_checks import live_problems

    problems, remarks = asyncio.run(live_problems(config, environment, timeout_s))
    if problems:
        raise ConfigError(with_lines(path, problems))
    return remarks


def _notes(config: Config) -> list[Problem]:
    # Keys in Redis are not read here.
    lacks_key = config.tenants and config.quotas.store == "memory" and needs_operator_key(config, people())
    return [*notes(config), *([Problem("admin.keys", NO_OPERATOR_KEY)] if lacks_key else [])]
