"""`gateway check`: problems of a router.yaml, many at a time; nothing is started or contacted."""

from collections.abc import Mapping, Sized
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gateway.config.load import load_config
from gateway.config.problems import ConfigError


def check(path: Path, environment: Mapping[str, str]) -> int:
    """0 and a summary where the file can be used, else 1 and its problems."""
    console = Console(soft_wrap=True)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    console.print(
        f"[green]{escape(str(path))} is fine[/]: {_counted(config.models, 'model')} on "
        f"{_counted(config.upstreams, 'upstream')}, {_counted(config.tenants, 'tenant')}"
    )
    return 0


def _counted(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def show_problems(path: Path, error: ConfigError) -> None:
    """One line a problem, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[red]{escape(str(path))} has {_counted(error.problems, 'problem')}[/]")
    for problem in error.problems:
        console.print(f"  [bold]{escape(problem.path)}[/]: {escape(problem.message)}")
