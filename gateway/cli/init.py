"""`gateway init`: write a router.yaml for models and servers, from options or from answers at a terminal.

`gateway schema` prints the JSON Schema that the file refers to.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from gateway.cli.named_models import (
    ServerKey,
    UnusableModel,
    add_server_key_option,
    sections_of,
    server_key,
)
from gateway.cli.output import show_line, show_problems, write_document
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.config.yaml_parser import format_yaml

# The JSON Schema of router.yaml for editors, in the package and next to a file.
SCHEMA_NAME = "router.schema.json"
SCHEMA = files("gateway.config") / SCHEMA_NAME
LISTEN, STORE = "127.0.0.1:8080", "memory"
HEADING = """\
# Configuration of the embedding gateway. `gateway check` reports its mistakes, `gateway serve` starts it, and
# `gateway schema` prints the schema, which describes all keys. Values may be ${NAME}, ${NAME:-default} or
# ${file:/path}.
"""
COMMENTS = {
    "listen": "# Address of the gateway. 0.0.0.0:8080 accepts callers from other machines.\n",
    "quotas": "# Store of quotas, keys and tenants: memory, or the URL of a Redis that gateways share.\n",
    "upstreams": (
        "# Groups of equal replicas: each has one model and one vector space. List further servers of a\n"
        "# model in its `replicas`. A server that needs a key gets it from `api_key: ${MY_KEY}`.\n"
    ),
    "models": "# Names that callers use. Several may lead to one upstream.\n",
    "defaults": "# Models for requests that name none.\n",
}
TENANTS = """\
# Without tenants there is one key: GATEWAY_API_KEY, or the one that the first start creates and keeps.
# `gateway keys create acme` prints a key, and the digest for this file.
# tenants:
#   acme:
#     keys: ["sha256:<64 hex digits>"]
#     limits: {requests_per_minute: 600, tokens_per_minute: 1000000}
"""

Ask = Callable[[str], str]


def editor_schema() -> str:
    """Return the text of the JSON Schema of router.yaml."""
    return SCHEMA.read_text(encoding="utf-8")


def editor_line(place: str = SCHEMA_NAME) -> str:
    """Return the comment by which editors find the schema. place: its path from the folder of the file."""
    return f"# yaml-language-server: $schema={place}\n"


def add_init_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `init` to its parser."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL|URL",
        help="hub id or folder for the built-in engine, or address of a TEI, vLLM, Infinity or OpenAI-like "
        "server; without any, they are asked for",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("router.yaml"), metavar="FILE", help="default: router.yaml"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help=f"address of the gateway (default: {LISTEN})")
    parser.add_argument(
        "--store", metavar="URL", help="Redis of quotas, keys and tenants (default: the gateway's memory)"
    )
    add_server_key_option(parser)


def add_schema_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `schema` to its parser."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it to a file, which is replaced"
    )


def run_schema(options: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001 - as every command
    """Print or write the JSON Schema; return 1 if the file cannot be written."""
    if options.output is None:
        write_document(editor_schema())
        return 0
    try:
        options.output.write_text(editor_schema(), encoding="utf-8")
    except OSError as error:
        show_line(f"{options.output} cannot be written: {error.strerror}")
        return 1
    return 0


def run_init(options: argparse.Namespace, environment: Mapping[str, str], ask: Ask = input) -> int:
    """Write the file and its schema; return 1 if the file exists, or nothing can be written."""
    path: Path = options.output
    if path.exists():
        show_line(f"{path} exists already, and is not overwritten; name another file with --output")
        return 1
    if not options.models and not sys.stdin.isatty():
        show_line("name a model or a server: gateway init BAAI/bge-m3 http://tei:8080")
        return 1
    try:
        sections = _sections(options.models, ask, server_key(options, environment))
        text = _text(sections, *_addresses(options, ask))
        config = parse_config(text, environment, path.parent)
    except UnusableModel as error:
        show_line(f"nothing was written: {error}")
        return 1
    except ConfigError as error:
        show_problems(path, error)
        return 1
    except (EOFError, KeyboardInterrupt):
        show_line("\nnothing was written")
        return 1
    try:
        _write(path, text)
    except OSError as error:
        show_line(f"{error.filename} cannot be written: {error.strerror}")
        return 1
    _show_result(path, config)
    return 0


def _sections(names: Sequence[str], ask: Ask, key: ServerKey | None) -> dict[str, Any]:
    """Return the sections of the models. Raises: UnusableModel, EOFError, KeyboardInterrupt."""
    return sections_of(names, key=key) if names else _asked_sections(ask, key)


def _asked_sections(ask: Ask, key: ServerKey | None) -> dict[str, Any]:
    """Ask for models and servers until an empty answer. Raises: EOFError, KeyboardInterrupt."""
    print("Models: hub ids or folders for the built-in engine, or addresses of servers. An empty line ends.")
    names: list[str] = []
    sections: dict[str, Any] = {}
    while True:
        name = ask(f"  model or URL {len(names) + 1}: ").strip()
        if not name and names:
            return sections
        if not name:
            continue
        try:
            sections = sections_of([*names, name], key=key)
        except UnusableModel as error:
            show_line(f"  {error}")
            continue
        known = len(names)
        names.append(name)
        for upstream, settings in [*sections["upstreams"].items()][known:]:
            print(f"    {upstream}: {settings['backend']}")


def _addresses(options: argparse.Namespace, ask: Ask) -> tuple[str, str]:
    """Return the gateway's address and the store, which are asked for if the models were."""
    listen, store = options.listen, options.store
    if not options.models:
        listen = listen or ask(f"Address of the gateway [{LISTEN}]: ").strip()
        store = store or ask("Redis for quotas and keys, such as redis://host:6379/0 [none]: ").strip()
    return listen or LISTEN, store or STORE


def _text(sections: Mapping[str, Any], listen: str, store: str) -> str:
    """Return the text of the file, with a comment above each section."""
    whole = {"listen": listen, "quotas": {"store": store}, **sections}
    parts = [COMMENTS[name] + format_yaml({name: section}) for name, section in whole.items()]
    return "\n".join([editor_line() + HEADING, *parts, TENANTS])


def _write(path: Path, text: str) -> None:
    """Write the file, and the schema next to it unless another file has that name. Raises: OSError."""
    # Fails if another program has written the file meanwhile.
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    with suppress(FileExistsError), path.with_name(SCHEMA_NAME).open("x", encoding="utf-8") as schema:
        schema.write(editor_schema())


def _show_result(path: Path, config: Config) -> None:
    option = "" if path == Path("router.yaml") else f" -c {path}"
    schema = path.with_name(SCHEMA_NAME)
    print(f"wrote {path} with {', '.join(config.models)}; its schema for editors is {schema}")
    print(f"start it: gateway serve{option}")
