"""Options of commands that send requests to a running gateway: its address, and a key.

Rule of all commands: the options, then GATEWAY_URL and GATEWAY_API_KEY, then the local gateway: the address
in the configuration, and the first key in its `state_dir`. A configuration that is named with -c takes
precedence over GATEWAY_URL, so that the command reaches no other gateway than the one that it names. The
first key is sent to the address in the configuration only.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from gateway.cli.gateway_client import TIMEOUT_S, GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.output import show_line, show_problems
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, host_and_port
from gateway.config.state_folder import state_folder
from gateway.tenants.first_key_file import FILE_NAME, FirstKeyFileError, read_first_key

# Addresses that mean every interface, and the loopback address that reaches them from here.
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - read, not listened on
# This object is the value of an option that is not given; an equal path that is given is another object.
DEFAULT_CONFIG = Path("router.yaml")
# Where `gateway serve MODEL` listens, which has no file.
DEFAULT_URL = "http://127.0.0.1:8080"
SECONDS_MAX = 86_400
URL_VARIABLE, KEY_VARIABLE = "GATEWAY_URL", "GATEWAY_API_KEY"


class FoundGateway(NamedTuple):
    """A gateway and the key for it.

    is_first: the key is the first one, which tenants may have ended. hint: where it does not answer.
    """

    url: str
    key: str | None
    is_first: bool = False
    hint: str = ""

    def client(self, ca: Path | None, timeout_s: float = TIMEOUT_S) -> GatewayClient:
        """Return a client of it. Raises: RequestRefused."""
        return GatewayClient(self.url, self.key, ca, timeout_s, is_optional=self.is_first, hint=self.hint)


def seconds(text: str) -> float:
    """Return a time of the command line in seconds. Raises: ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # False for nan too.
    if not 0 < value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"more than 0 and at most {SECONDS_MAX} seconds, not {text!r}")
    return value


# A parser, or a titled group of its options.
Parser = TypeVar("Parser", argparse.ArgumentParser, "argparse._ArgumentGroup")  # noqa: SLF001 - has no other name


def add_config_option(parser: Parser, text: str = "the configuration (default: router.yaml)") -> Parser:
    """Add `--config` with its help to a parser, and return it."""
    parser.add_argument("-c", "--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help=text)
    return parser


def add_json_option(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--json` to a parser, and return it."""
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser


def add_operator_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a command that asks the admin API, and return the parser."""
    add_config_option(parser)
    add_admin_address_options(parser)
    return add_json_option(parser)


def add_admin_address_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that find the admin API to the parser of a command that has `--config` too."""
    add_address_options(parser, "`admin.listen` or `listen`", "a key that has the scope admin")


def add_key_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a command that sends requests as a caller, and return the parser."""
    add_config_option(parser, "the configuration, for the gateway's address")
    add_address_options(parser, "`listen`", "an API key")
    return parser


def add_address_options(parser: Parser, setting: str, key: str) -> None:
    """Add the options that find a gateway. setting: with its address. key: that the file has."""
    text = f"URL of the gateway (default: that of -c; else {URL_VARIABLE}, else {setting} in router.yaml)"
    parser.add_argument("--url", help=text)
    text_of_key = f"file with {key} (default: {KEY_VARIABLE}, else the first key of the local gateway)"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text_of_key)
    text = "authority that signed its certificate, in PEM"
    parser.add_argument("--ca", type=Path, metavar="FILE", help=text)


def named_url(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the address that an option or a variable names, or nothing."""
    if options.url or options.config is not DEFAULT_CONFIG:
        return options.url or ""
    return environment.get(URL_VARIABLE, "")


def find_gateway(
    options: argparse.Namespace, environment: Mapping[str, str], *, for_operators: bool
) -> FoundGateway:
    """Return the gateway of a command, by its listener for operators or for callers, and the key for it.

    Raises: ConfigError; RequestRefused if there is no such configuration, its port is 0, or a key is none.
    """
    key = operator_key(options.key_file, environment)
    if url := named_url(options, environment):
        return FoundGateway(url, key)
    path, config, hint = options.config, None, ""
    if path.exists():
        config = load_config(path, environment, ("listen", "admin", "tls"))
    elif path is not DEFAULT_CONFIG:
        raise RequestRefused(
            f"there is no {path}: pass the URL of the gateway with --url, or a config with -c"
        )
    else:
        hint = f"; there is no {path} here: name another gateway with --url or {URL_VARIABLE}"
    url = DEFAULT_URL if config is None else address_of(config, for_operators=for_operators)
    first = None if key else _first_key(config, environment)
    return FoundGateway(url, key or first, first is not None, hint)


def address_of(config: Config, *, for_operators: bool) -> str:
    """Return the URL of the admin API, or of the callers' API. Raises: RequestRefused."""
    host, port = host_and_port((for_operators and config.admin.listen) or config.listen)
    if not port:
        raise RequestRefused("the config has no fixed port (port 0); pass --url")
    host = ANYWHERE.get(host.strip("[]"), host.strip("[]"))
    return f"{'https' if config.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _first_key(config: Config | None, environment: Mapping[str, str]) -> str | None:
    """Return the first key of a gateway of this user, None if there are tenants or it cannot be read."""
    folder = state_folder(None if config is None else config.state_dir, environment)
    if folder is None or (config is not None and config.tenants):
        return None
    with suppress(FirstKeyFileError):
        return read_first_key(folder / FILE_NAME)
    return None


def ask_gateway(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    run: Callable[[GatewayClient, str], object],
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Run an action with a client of the admin API and its URL; return 1 and print why if it fails."""
    try:
        found = find_gateway(options, environment, for_operators=True)
        with closing(found.client(options.ca, timeout_s)) as client:
            run(client, found.url)
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except (RequestRefused, GatewayUnavailable) as error:
        show_line(str(error))
        return 1
    return 0


def operator_key(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the key that is named. Raises: RequestRefused if the file cannot be read, or a key is none."""
    if path is None:
        return checked_key(environment.get(KEY_VARIABLE, ""), KEY_VARIABLE)
    try:
        return checked_key(path.read_text(encoding="ascii"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestRefused(f"{path} contains no readable key") from error


def checked_key(key: str, place: str) -> str | None:
    """Return a key without the space around it, None if it is empty.

    Raises: RequestRefused, without the key, if no header can hold it.
    """
    found = key.strip()
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise RequestRefused(f"{place} is no key: it has spaces, several lines, or letters beyond ASCII")
    return found or None
