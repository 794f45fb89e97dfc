"""`gateway status`: what a running gateway is doing, on a terminal or as JSON."""

import argparse
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from gateway.cli.asking import Asker, Away, Refused
from gateway.cli.check import show_problems
from gateway.cli.status_view import view
from gateway.cli.store import show_line
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import host_and_port
from gateway.telemetry.snapshot import Rates, Snapshot, rates_between

LOOK_EVERY_S = 1.0
PATH = "/admin/status"
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - read, not listened on
# What a pipe has no width for.
WIDTH = 120


class Look:
    """What was seen last, and what went on since the time before."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.snapshot: Snapshot | None = None
        self.rates: Rates | None = None
        self.problem = ""

    def saw(self, snapshot: Snapshot) -> None:
        """The gateway has told."""
        self.rates = rates_between(self.snapshot, snapshot) if self.snapshot else None
        self.snapshot, self.problem = snapshot, ""

    def missed(self, problem: str) -> None:
        """It has not; what was seen last stays, and says that it is old."""
        self.rates, self.problem = None, problem

    def __rich__(self) -> RenderableType:
        """As it is shown."""
        return view(self.url, self.snapshot, self.rates, self.problem)


def status(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 when shown; 1 where the gateway cannot be asked, or will not tell."""
    try:
        url = arguments.url or _address(arguments.config, environment)
        asker = Asker(url, _key(arguments.key_file, environment), arguments.ca)
        if arguments.json:
            print(msgspec.json.encode(asker.get(PATH, Snapshot)).decode())
        elif arguments.once or not Console().is_terminal:
            _show_once(asker, Look(url))
        else:
            _follow(asker, Look(url))
    except ConfigError as error:
        show_problems(arguments.config, error)
        return 1
    except (Refused, Away) as error:
        show_line(str(error))
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _address(path: Path, environment: Mapping[str, str]) -> str:
    """Raises: ConfigError; Refused where it listens on whichever port is free."""
    config = load_config(path, environment)
    host, port = host_and_port(config.admin.listen or config.listen)
    if not port:
        raise Refused("the configuration names no port; say --url")
    host = ANYWHERE.get(host.strip("[]"), host.strip("[]"))
    return f"{'https' if config.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _key(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """Raises: Refused where the file cannot be read."""
    if path is None:
        return environment.get("GATEWAY_API_KEY") or None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} holds no key that can be read") from error


def _show_once(asker: Asker, look: Look) -> None:
    """Raises: Away, Refused."""
    look.saw(asker.get(PATH, Snapshot))
    time.sleep(LOOK_EVERY_S)
    look.saw(asker.get(PATH, Snapshot))
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(look)


def _follow(asker: Asker, look: Look) -> None:
    """Until Ctrl-C. Raises: Refused."""
    interrupted = Event()

    def interrupt(*_: object) -> None:
        # Where it meets a callback or a finalizer, Python drops the exception.
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    with Live(look, screen=True, auto_refresh=False) as live:
        while not interrupted.is_set():
            try:
                look.saw(asker.get(PATH, Snapshot))
            except Away as error:
                look.missed(str(error))
            live.refresh()
            interrupted.wait(LOOK_EVERY_S)
