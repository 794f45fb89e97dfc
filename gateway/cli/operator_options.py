"""Options of commands that send requests to a running gateway: its address, and the operator's key."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from gateway.cli.gateway_client import TIMEOUT_S, GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.output import show_line, show_problems
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import host_and_port

# Addresses that mean every interface, and the loopback address that reaches them from here.
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - read, not listened on


def add_config_option(
    parser: argparse.ArgumentParser, text: str = "the configuration (default: router.yaml)"
) -> argparse.ArgumentParser:
    """Add `--config` with its help to a parser, and return it."""
    parser.add_argument("-c", "--config", type=Path, default=Path("router.yaml"), metavar="FILE", help=text)
    return parser


def add_operator_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of a command that has `--config` too."""
    add_address_options(parser, "`admin.listen` or `listen`", "a key that has the scope admin")


def add_key_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a command that sends requests as a caller, and return the parser."""
    add_config_option(parser, "the configuration, for the gateway's address")
    add_address_options(parser, "`listen`", "an API key")
    return parser


def add_address_options(parser: argparse.ArgumentParser, setting: str, key: str) -> None:
    """Add the options that find a gateway. setting: with its address. key: that the file has."""
    text = f"URL of the gateway (default: GATEWAY_URL, or {setting} of the configuration)"
    parser.add_argument("--url", help=text)
    text = f"file with {key} (default: GATEWAY_API_KEY)"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)
    text = "authority that signed its certificate, in PEM"
    parser.add_argument("--ca", type=Path, metavar="FILE", help=text)


def caller_url(url: str | None, config: Path, environment: Mapping[str, str]) -> str:
    """Return the URL of the callers' API, of the environment or the config if none is given.

    Raises: ConfigError, RequestRefused.
    """
    return url or environment.get("GATEWAY_URL") or _address(config, environment, for_operators=False)


def gateway_url(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the URL of the admin API. Raises: ConfigError, RequestRefused."""
    url: str = options.url or environment.get("GATEWAY_URL") or ""
    return url or _address(options.config, environment, for_operators=True)


def _address(path: Path, environment: Mapping[str, str], *, for_operators: bool) -> str:
    """Return the URL of the admin API, or of the callers' API, from the config.

    Raises: ConfigError; RequestRefused if there is no configuration, or its port is 0.
    """
    if not path.exists():
        raise RequestRefused(
            f"there is no {path}: pass the URL of the gateway with --url, or a config with -c"
        )
    config = load_config(path, environment, ("listen", "admin", "tls"))
    host, port = host_and_port((for_operators and config.admin.listen) or config.listen)
    if not port:
        raise RequestRefused("the config has no fixed port (port 0); pass --url")
    host = ANYWHERE.get(host.strip("[]"), host.strip("[]"))
    return f"{'https' if config.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def ask_gateway(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    run: Callable[[GatewayClient, str], object],
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Run an action with a client of the admin API and its URL; return 1 and print why if it fails."""
    try:
        url = gateway_url(options, environment)
        key = operator_key(options.key_file, environment)
        with closing(GatewayClient(url, key, options.ca, timeout_s)) as client:
            run(client, url)
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except (RequestRefused, GatewayUnavailable) as error:
        show_line(str(error))
        return 1
    return 0


def operator_key(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the operator's key. Raises: RequestRefused if the file cannot be read, or a key is none."""
    if path is None:
        return checked_key(environment.get("GATEWAY_API_KEY", ""), "GATEWAY_API_KEY")
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
