"""`gateway embed`: files of rows to files of rows with vectors, through a running gateway."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec

from gateway.cli.embed.options import add_embed_options
from gateway.cli.output import show_line

__all__ = ["add_embed_options", "run_embed"]


def run_embed(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Embed the texts of files; return the exit status."""
    if find_spec("pyarrow") is None:
        show_line("`gateway embed` needs the package pyarrow: install the gateway's extra `grpc`")
        return 1
    # pyarrow takes a while to load.
    from gateway.cli.embed.run import embed_files

    return embed_files(options, environment)
