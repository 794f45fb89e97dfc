"""Command line parser, which runs the chosen command from its own module."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from gateway import __version__
from gateway.cli.batch import add_batch_options, batch
from gateway.cli.bench import add_bench_options, bench
from gateway.cli.check import check
from gateway.cli.completion import add_completion_options, completion
from gateway.cli.context import add_store_options
from gateway.cli.embed.options import add_embed_options, embed
from gateway.cli.import_config import add_import_options, import_config
from gateway.cli.init import add_init_options, add_schema_options, init, schema
from gateway.cli.instances import add_instances_options, instances
from gateway.cli.keys import keys
from gateway.cli.models import add_models_options, models
from gateway.cli.operator_options import add_config_option, add_operator_options
from gateway.cli.printable import escape_unprintable
from gateway.cli.serve import add_serve_options, serve_command
from gateway.cli.status import status
from gateway.cli.tenants import tenants
from gateway.cli.usage import usage
from gateway.cli.verify import verify
from gateway.config.schema import Scope
from gateway.config.state_folder import home_for_libraries

EPILOG = """\
environment:
  GATEWAY_API_KEY   the key of a gateway without tenants; if unset, one is created, printed once and kept
                    in `state_dir`; `status`, `bench`, `embed`, `batch` and `instances` send it to the gateway
  STATE_DIRECTORY, XDG_STATE_HOME, HOME   the default of `state_dir`, in this order
  LISTEN            the address in the router.yaml that comes with the project
  HF_TOKEN, HF_HOME, HF_HUB_OFFLINE   read by the Hugging Face Hub's own tools

signals of `serve`: SIGTERM and SIGINT stop it, SIGHUP reloads the file

exit status: 0 success, 1 failure (the message gives the reason), 2 wrong command line; of `embed` also 3,
stopped for now (the same command continues), and 130 or 143 after a signal
"""

# Commands that take all their options.
COMMANDS: dict[str, Callable[[argparse.Namespace, Mapping[str, str]], int]] = {
    "batch": batch,
    "bench": bench,
    "completion": completion,
    "embed": embed,
    "init": init,
    "import": import_config,
    "instances": instances,
    "keys": keys,
    "models": models,
    "schema": schema,
    "status": status,
    "tenants": tenants,
    "usage": usage,
    "verify": verify,
}
NAMES = ("check", "serve", *COMMANDS)


def main() -> None:
    """Run the `gateway` command; entry point."""
    escape_unprintable()
    environment = dict(os.environ)
    os.environ.update(home_for_libraries(environment))
    try:
        try:
            code = _run(_parser(), environment)
        finally:
            # Flushed here, where an error can be caught, rather than when the interpreter exits.
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        code = 1
    sys.exit(code)


def _run(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> int:
    """Run the command of the command line and return its exit status."""
    if len(sys.argv) == 1:
        parser.print_help(sys.stderr)
        return 2
    options = _parsed(parser)
    if options.command == "serve":
        return serve_command(options, environment)
    if options.command == "check":
        return check(options.config, environment)
    return COMMANDS[options.command](options, environment)


def _parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line, or exit with a hint at what was meant."""
    word = sys.argv[1]
    if not word.startswith("-") and word not in NAMES:
        similar = get_close_matches(word, NAMES, n=1)
        hint = f"did you mean `{similar[0]}`? " if similar else ""
        parser.error(f"there is no command {word!r}; {hint}`gateway --help` lists all")
    options, unknown = parser.parse_known_args()
    if unknown:
        has_file = "config" in options and any(name.endswith((".yaml", ".yml")) for name in unknown)
        hint = "; a configuration is named with -c FILE" if has_file else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def _discard_output() -> None:
    """Redirect further output to nowhere, because the reader has closed the pipe, as `head` does."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(devnull, stream.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gateway",
        description="One address for every embedding and rerank model a company runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gateway {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    text = "start the gateway: on a router.yaml, or on models by their names and servers by their URLs"
    add_serve_options(add_config_option(commands.add_parser("serve", help=text, description=text)))
    text = "write a router.yaml for models and servers, whose kinds are found by asking them"
    add_init_options(commands.add_parser("init", help=text, description=text))
    text = "report every problem of a router.yaml, each with its line, its path and the allowed values"
    add_config_option(commands.add_parser("check", help=text, description=text))
    text = "print the JSON Schema of router.yaml, for editors"
    add_schema_options(commands.add_parser("schema", help=text, description=text))
    text = "print a script that completes this command line in bash, zsh or fish"
    add_completion_options(commands.add_parser("completion", help=text, description=text))
    commands.choices["completion"].set_defaults(parser=parser)
    text = "create, list and revoke API keys in Redis, or in the file of a gateway without it"
    _add_keys(commands.add_parser("keys", help=text, description=text))
    text = "set, list and remove tenants next to router.yaml; for a tenant that it has too, it wins"
    _add_tenants(commands.add_parser("tenants", help=text, description=text))
    text = "list, download, check, remove and inspect checkpoints for the built-in engine"
    add_models_options(commands.add_parser("models", help=text, description=text))
    text = "list, create, start, stop, restart and delete instances of a running gateway, and show their logs"
    add_instances_options(commands.add_parser("instances", help=text, description=text))
    text = "write the router.yaml that corresponds to a configuration of LiteLLM"
    add_import_options(commands.add_parser("import", help=text, description=text))
    text = "embed the texts of files through a gateway, and write files with the vectors; can be continued"
    add_embed_options(commands.add_parser("embed", help=text, description=text))
    text = "submit files of requests to a running gateway, watch, fetch and cancel them"
    add_batch_options(commands.add_parser("batch", help=text, description=text))
    _add_observers(commands)
    return parser


def _add_observers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that look at a gateway and change nothing."""
    text = "show the settled usage of tenants by model and day (UTC)"
    _add_usage(add_store_options(commands.add_parser("usage", help=text, description=text)))
    text = "show the state of a running gateway every second until Ctrl-C"
    _add_status(add_config_option(commands.add_parser("status", help=text, description=text)))
    text = "check that upstreams return the same vectors as each other and as their stored fingerprints"
    _add_verify(add_config_option(commands.add_parser("verify", help=text, description=text)))
    text = "measure a server: calls at a rate or from callers, percentiles, and a picture"
    add_bench_options(commands.add_parser("bench", help=text, description=text))


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    create = add_store_options(actions.add_parser("create", help="create a key and print it once"))
    create.add_argument("tenant", help="tenant that is billed and limited")
    create.add_argument("--id", help="name in lists and for `revoke` (default: random)")
    create.add_argument("--expires", type=_moment, metavar="DATE", help="2027-01-31, or with a time; UTC")
    create.add_argument(
        "--scope",
        action="append",
        choices=get_args(Scope),
        metavar="SCOPE",
        help="embed, rerank, tokenize, metrics or admin; may be repeated",
    )
    create.add_argument("--model", action="append", help="the only model it may use; may be repeated")
    create.add_argument(
        "--limit",
        action="append",
        metavar="NAME=AMOUNT",
        help="tokens_per_minute=1000, in addition to its tenant's limits; may be repeated",
    )
    create.add_argument("--yaml", action="store_true", help="store nothing; print a line for router.yaml")
    listing = add_store_options(actions.add_parser("list", help="all keys, without their secrets"))
    listing.add_argument("--json", action="store_true", help="for scripts")
    revoke = add_store_options(
        actions.add_parser("revoke", help="revoke a key; every gateway rejects it within a second")
    )
    revoke.add_argument("id", help="as `list` shows it")


def _add_tenants(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    setting = add_store_options(
        actions.add_parser("set", help="add a tenant, or change settings; those not named stay as they are")
    )
    setting.add_argument("tenant", help="its name")
    setting.add_argument("--model", action="append", help="the only model it may use; may be repeated")
    setting.add_argument(
        "--limit", action="append", metavar="NAME=AMOUNT", help="tokens_per_minute=100000; may be repeated"
    )
    setting.add_argument(
        "--model-limit",
        action="append",
        metavar="MODEL:NAME=AMOUNT",
        help="a limit for one model, instead of the model's own; may be repeated",
    )
    setting.add_argument("--weight", type=int, help="share of a busy model (default: 1)")
    setting.add_argument("--priority", choices=["interactive", "bulk"], help="default: interactive")
    setting.add_argument("--queue-tokens", type=int, help="most tokens that may wait for one model")
    setting.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help="its texts may share an upstream request with others' (default), or never do",
    )
    setting.add_argument(
        "--unset",
        action="append",
        metavar="FIELD",
        help="remove a setting: models, weight, priority, queue_tokens, join, limits, the name of a limit, "
        "model_limits, or MODEL:NAME; may be repeated",
    )
    setting.add_argument("--replace", action="store_true", help="remove all settings that are not named")
    listing = add_store_options(actions.add_parser("list", help="all tenants that are not in router.yaml"))
    listing.add_argument("--json", action="store_true", help="for scripts")
    remove = add_store_options(actions.add_parser("remove", help="remove a tenant and its keys"))
    remove.add_argument("tenant", help="its name")


def _add_usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?", help="tenant (default: all)")
    parser.add_argument("--since", type=_day, metavar="DAY", help="2027-01-31 (default: today)")
    parser.add_argument("--until", type=_day, metavar="DAY", help="the last day (default: today)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", const="json", dest="form", help="for scripts")
    form.add_argument("--csv", action="store_const", const="csv", dest="form", help="for spreadsheets")
    form.add_argument("--form", choices=["table", "json", "csv"], default="table", help="the same, older")
    parser.add_argument(
        "--by",
        choices=["model", "key"],
        default="model",
        help="a row for each model, or for each model and key",
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    add_operator_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the status with the rates of one second, and exit"
    )
    parser.add_argument("--json", action="store_true", help="one snapshot, for scripts")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="upstreams (default: all that embed)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="additional texts, one per line")
    parser.add_argument(
        "--min-cosine",
        type=_cosine,
        help="minimum for every two replicas (default: 0.999 for those of one model)",
    )
    parser.add_argument(
        "--accept", action="store_true", help="replace the stored fingerprints of these upstreams"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="timeout for one upstream (default: 300)"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no day such as 2027-01-31") from error


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        expected = "a day such as 2027-01-31, nor a moment such as 2027-01-31T12:00:00Z"
        raise argparse.ArgumentTypeError(f"{text!r} is neither {expected}") from error


def _cosine(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("a number above 0, and at most 1")
    return value
