"""`gateway embed`, which loads what it needs only when it runs."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec

from gateway.cli.output import show_line


def embed(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Embed the texts of files; return the exit status."""
    if find_spec("pyarrow") is None:
        show_line("`gateway embed` needs the package pyarrow: install the gateway's extra `grpc`")
        return 1
    from gateway.cli.embed.session import run_embed

    return run_embed(options, environment)
