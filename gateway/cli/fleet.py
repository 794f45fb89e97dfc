"""View of `gateway status --fleet`: all gateways that share a store, as a table."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli.output import NONE, short, span, table_of
from gateway.cli.printable import plain
from gateway.config.problems import count_of
from gateway.fleet.members import FleetMember, FleetReport

PATH = "/admin/fleet"
COLUMNS = (
    *("gateway", "state", "version", "configuration"),
    *("#up", "#workers", "#calls/s", "#in flight", "#waiting", "note"),
)
STYLES = {"ready": "green", "drained": "yellow", "stopping": "yellow"}


def fleet_view(report: FleetReport) -> RenderableType:
    """Return the whole view."""
    head = Text(count_of(report.members, "gateway"), "bold")
    head.append("" if report.shared else ", which shares no Redis with others", "not bold")
    for number, noun in ((report.versions, "versions"), (report.configurations, "configurations")):
        if number > 1:
            head.append(f" · {number} {noun}", "bold yellow")
    if report.problem:
        head.append(f" · {plain(report.problem)}", "bold red")
    return Group(head, Text(), fleet_table(report))


def fleet_table(report: FleetReport) -> Table:
    """Return the gateways by name."""
    rows = [
        (
            member.name,
            Text(member.state.replace("_", " "), STYLES.get(member.state, "bold red")),
            _marked(member.version, is_odd="version" in member.differs),
            _marked(member.configuration, is_odd=bool(set(member.differs) - {"version"})),
            span(member.uptime_s),
            str(member.workers),
            short(member.load.calls_per_s),
            str(member.load.calls_in_flight),
            str(member.load.queued_inputs),
            "; ".join(_notes(member)) or NONE,
        )
        for member in report.members
    ]
    return table_of(COLUMNS, rows)


def _marked(text: str, *, is_odd: bool) -> Text:
    """Return a value, with a mark that needs no colour where most gateways have another one."""
    return Text(f"{plain(text)} *", "bold yellow") if is_odd else Text(plain(text))


def _notes(member: FleetMember) -> Iterator[str]:
    if member.is_this:
        yield "answers"
    if member.state == "silent":
        yield f"last seen {span(member.age_s)} ago"
    yield from member.reasons
    if member.differs:
        yield f"differs in {', '.join(member.differs)}"
    if member.drained_replicas:
        yield f"drained replicas: {', '.join(member.drained_replicas)}"
