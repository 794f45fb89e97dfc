"""`gateway completion SHELL`: print a script that completes commands, options and files in a shell."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.cli.output import show_line

SHELLS = ("bash", "zsh", "fish")


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `completion` to its parser."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def run_completion(options: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001 - as every command
    """Print the script; return 1 if the package that writes it is missing."""
    # The script itself calls nothing: importing the gateway would take half a second at each key press.
    try:
        import shtab
    except ModuleNotFoundError:
        show_line("completion needs the package shtab: .venv/bin/pip install -r requirements/runtime.txt")
        return 1
    for action in _actions(options.parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(options.parser, shell=options.shell), end="")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser, and of its commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _actions(command)
