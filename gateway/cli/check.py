"""`gateway check`: every problem of a router.yaml at once; nothing is started or contacted."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gateway.config_file import ConfigError, load_config


def check(path: Path, environment: Mapping[str, str]) -> int:
    """0 and a summary where the file can be used, else 1 and its problems."""
    console = Console(soft_wrap=True)
    try:
        config = load_config(path, environment)
    except ConfigError as error:
        show_problems(path, error)
        return 1
    console.print(
        f"[green]{escape(str(path))} is fine[/]: {len(config.models)} models on "
        f"{len(config.upstreams)} upstreams, {len(config.tenants)} tenants"
    )
    return 0


def show_problems(path: Path, error: ConfigError) -> None:
    """One line a problem, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    count = len(error.problems)
    console.print(f"[red]{escape(str(path))} has {count} problem{'s' if count > 1 else ''}[/]")
    for problem in error.problems:
        console.print(f"  [bold]{escape(problem.path)}[/]: {escape(problem.message)}")
