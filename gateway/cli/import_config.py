"""`gateway import`: the router.yaml that corresponds to another gateway's configuration."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from rich.markup import escape

from gateway.cli.litellm_config import Unreadable, import_litellm
from gateway.cli.output import CleanConsole, write_document


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Add the sources of `gateway import` and their options to its parser."""
    sources = parser.add_subparsers(dest="source", required=True, metavar="source")
    litellm = sources.add_parser("litellm", help="a config.yaml of LiteLLM's proxy")
    litellm.add_argument("file", type=Path, help="the config.yaml")
    litellm.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write; it must not exist (default: print)"
    )


def import_config(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print or write the configuration; report what it leaves out; return 1 if there is none."""
    errors = CleanConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    try:
        found = import_litellm(options.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Unreadable) as error:
        errors.print(f"[red]{escape(str(options.file))}[/]: {escape(str(error))}")
        return 1
    if options.output is None:
        write_document(found.text)
    else:
        try:
            _write(options.output, found.text)
        except OSError as error:
            errors.print(f"[red]{escape(str(options.output))}[/]: {escape(error.strerror or str(error))}")
            return 1
    for line in found.left_out:
        errors.print(f"left out  {escape(line)}")
    for line in found.warnings:
        errors.print(f"note  {escape(line)}")
    missing = [name for name in found.variables if name not in environment]
    if missing:
        errors.print(f"set before the start: {escape(', '.join(missing))}")
    for name in (name for name in missing if name.endswith("_SHA256")):
        key = name.removesuffix("_SHA256")
        errors.print(escape(f'  export {name}="$(printf %s "${key}" | sha256sum | cut -d " " -f 1)"'))
    return 0


def _write(path: Path, text: str) -> None:
    """Write a new file, with digests of keys, that only this user can read. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
