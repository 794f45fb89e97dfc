"""`gateway status`: show the state of a running gateway, on a terminal or as JSON."""

import argparse
import signal
import time
from collections.abc import Mapping
from threading import Event

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from gateway.cli.check import show_problems
from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.operator_options import add_config_option, add_operator_options, gateway_url, operator_key
from gateway.cli.output import PIPE_WIDTH, show_line
from gateway.cli.status_view import view
from gateway.config.problems import ConfigError
from gateway.telemetry.snapshot import Rates, Snapshot, rates_between

POLL_EVERY_S = 1.0
PATH = "/admin/status"


class StatusDisplay:
    """The last snapshot, and the rates since the one before it. Renders itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.snapshot: Snapshot | None = None
        self.rates: Rates | None = None
        self.problem = ""

    def update(self, snapshot: Snapshot) -> None:
        """Show a new snapshot."""
        self.rates = rates_between(self.snapshot, snapshot) if self.snapshot else None
        self.snapshot, self.problem = snapshot, ""

    def fail(self, problem: str) -> None:
        """Show why there is no new snapshot; the last one stays, with its age."""
        self.rates, self.problem = None, problem

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the display for the width of the terminal; live, for its height too."""
        content = view(self.url, self.snapshot, self.rates, self.problem, options.max_width)
        lines = console.render_lines(content, options, pad=False)
        if console.is_alt_screen and len(lines) > options.max_height:
            shown = options.max_height - 1
            note = Text(f"{len(lines) - shown} more lines: a taller terminal or --once shows them", "dim")
            lines = lines[:shown] + console.render_lines(note, options)
        for line in lines:
            yield Segments([*line, Segment.line()])


def add_status_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway status` to its parser."""
    add_config_option(parser)
    add_operator_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the status with the rates of one second, and exit"
    )
    parser.add_argument("--json", action="store_true", help="one snapshot, for scripts")


def status(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the status; return 1 if the gateway cannot be reached or refuses the request."""
    try:
        url = gateway_url(options, environment)
        client = GatewayClient(url, operator_key(options.key_file, environment), options.ca)
        if options.json:
            print(msgspec.json.encode(client.get(PATH, Snapshot)).decode())
        elif options.once or not Console().is_terminal:
            _show_once(client, StatusDisplay(url))
        else:
            _follow(client, StatusDisplay(url))
    except ConfigError as error:
        show_problems(options.config, error)
        return 1
    except (RequestRefused, GatewayUnavailable) as error:
        show_line(str(error))
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _show_once(client: GatewayClient, display: StatusDisplay) -> None:
    """Print the status with the rates of one second. Raises: GatewayUnavailable, RequestRefused."""
    display.update(client.get(PATH, Snapshot))
    time.sleep(POLL_EVERY_S)
    display.update(client.get(PATH, Snapshot))
    console = Console()
    Console(width=None if console.is_terminal else PIPE_WIDTH).print(display)


def _follow(client: GatewayClient, display: StatusDisplay) -> None:
    """Refresh the status until Ctrl-C. Raises: RequestRefused."""
    interrupted = Event()

    def interrupt(*_: object) -> None:
        # Python drops an exception that is raised inside a callback or a finalizer, but not the event.
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    with Live(display, screen=True, auto_refresh=False) as live:
        while not interrupted.is_set():
            try:
                display.update(client.get(PATH, Snapshot))
            except GatewayUnavailable as error:
                display.fail(str(error))
            live.refresh()
            interrupted.wait(POLL_EVERY_S)
