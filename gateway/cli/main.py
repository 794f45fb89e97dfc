"""Command line: one table of commands, each in a module that is imported only when it runs."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TextIO

from gateway import __version__
from gateway.cli.printable import escape_unprintable
from gateway.config.state_folder import home_for_libraries
from gateway.processes.launch import import_unscanned

EPILOG = """\
environment:
  GATEWAY_API_KEY   of `serve`: the key of a gateway without tenants; if unset, one is created, printed once
                    and kept in `state_dir`; of commands that ask a gateway: the key that they send
  GATEWAY_URL       the gateway that commands ask, unless -c FILE or --url names one
  STATE_DIRECTORY, XDG_STATE_HOME, HOME   the default of `state_dir`, in this order
  LISTEN            the address in the router.yaml that comes with the project
  HF_TOKEN, HF_HOME, HF_HUB_OFFLINE   read by the Hugging Face Hub's own tools

commands that ask a gateway find it by --url, by -c FILE, by GATEWAY_URL, or by router.yaml, and its key by
--key-file, by GATEWAY_API_KEY, or by the first key in `state_dir`, which is for the address in the file

signals of `serve`: SIGTERM and SIGINT stop it, SIGHUP reloads the file

exit status: 0 success, 1 failure (the message gives the reason), 2 wrong command line, 3 partly: `embed`
stopped for now (the same command continues), `batch` has lines that failed; 130 or 143 after a signal
"""


# Line of help of each command. Its module has its name, and two functions: `add_NAME_options` and `run_NAME`.
COMMANDS = {
    "serve": "start the gateway: on a router.yaml, or on models by their names and servers by their URLs",
    "init": "write a router.yaml for models and servers, whose kinds are found by asking them",
    "check": "report every problem of a router.yaml, each with its line, its path and the allowed values",
    "schema": "print the JSON Schema of router.yaml, for editors",
    "completion": "print a script that completes this command line in bash, zsh or fish",
    "keys": "create, list, rotate and revoke API keys in Redis, or in the file of a gateway without it",
    "tenants": "set, list and remove tenants next to router.yaml; for a tenant that it has too, it wins",
    "audit": "show what operators have changed: who, when, from where, and what it was before",
    "export": "write all stored tenants, keys, upstreams, models, drains, counts and usage to one file",
    "restore": "merge such a file into the store, after a loss or into another one; counts are never lowered",
    "models": "list, download, check, remove and inspect checkpoints for the built-in engine",
    "instances": (
        "list, create, start, stop, restart and delete instances of a running gateway, and show their logs"
    ),
    "import": "write the router.yaml that corresponds to a configuration of LiteLLM",
    "embed": "embed the texts of files through a gateway, and write files with the vectors; can be continued",
    "batch": "submit files of requests to a running gateway, watch, fetch and cancel them",
    "usage": "show the settled usage of tenants by model and day (UTC)",
    "status": "show the state of a running gateway every second until Ctrl-C",
    "drain": "have load balancers send a running gateway no more calls, until --undo or its stop",
    "replicas": "list the replicas of a running gateway, drain one, and put it back",
    "verify": "check that upstreams return the same vectors as each other and as their stored fingerprints",
    "bench": "measure a server: calls at a rate or from callers, percentiles, and a picture",
}
# Modules with other names than their commands.
MODULES = {"schema": "init", "import": "litellm_config"}
# Faults of an output: a full device, a quota, a bound on files, a fault of the device, a closed descriptor.
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def _function(name: str, command: str) -> Callable[..., Any]:
    """Return a function of a command, whose module is imported now."""
    module = import_unscanned(f"gateway.cli.{MODULES.get(command, command)}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def main() -> None:
    """Run the `gateway` command; entry point."""
    if sys.stdout is None:
        # It was closed before the start, and the next file or socket would take its descriptor.
        sys.exit("standard output is closed: send it to a file, or to /dev/null")
    escape_unprintable()
    environment = dict(os.environ)
    os.environ.update(home_for_libraries(environment))
    try:
        try:
            code: int | str = _run(environment)
        finally:
            # Flushed here, where an error can be caught, rather than when the interpreter exits.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as `head` does.
        _discard(sys.stdout, sys.stderr)
        code = 1
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        _discard(sys.stdout)
        code = f"the output cannot be written: {error.strerror}"
    sys.exit(code)


def parser_of(*names: str) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of these commands only."""
    parser = argparse.ArgumentParser(
        prog="gateway",
        description="One address for every embedding and rerank model a company runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gateway {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        options = commands.add_parser(name, help=text, description=text)
        if name in names:
            _function(f"add_{name}_options", name)(options)
    return parser


def full_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of all commands."""
    parser = parser_of(*COMMANDS)
    parser.set_defaults(parser=parser)
    return parser


def _run(environment: Mapping[str, str]) -> int:
    """Run the command of the command line and return its exit status."""
    if len(sys.argv) == 1:
        parser_of().print_help(sys.stderr)
        return 2
    word = sys.argv[1]
    options = _parsed(full_parser() if word == "completion" else parser_of(word))
    status: int = _function(f"run_{options.command}", options.command)(options, environment)
    return status


def _parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line, or exit with a hint at what was meant."""
    word = sys.argv[1]
    if not word.startswith("-") and word not in COMMANDS:
        similar = get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean `{similar[0]}`? " if similar else ""
        parser.error(f"there is no command {word!r}; {hint}`gateway --help` lists all")
    options, unknown = parser.parse_known_args()
    if unknown:
        has_file = "config" in options and any(name.endswith((".yaml", ".yml")) for name in unknown)
        hint = "; a configuration is named with -c FILE" if has_file else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def _discard(*streams: TextIO) -> None:
    """Redirect further output to nowhere; the interpreter writes what it has left when it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(devnull, stream.fileno())
