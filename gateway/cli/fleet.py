"""View of `gateway status --fleet`: all gateways that share a store, as a table."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli.output import NONE, short, span
from gateway.cli.printable import plain
from gateway.fleet.members import FleetMember, FleetReport

PATH = "/admin/fleet"
COLUMNS = (
    *("gateway", "state", "version", "configuration"),
    *("#up", "#workers", "#calls/s", "#in flight", "#waiting", "note"),
)
STYLES = {"ready": "green", "drained": "yellow", "stopping": "yellow"}


def fleet_view(report: FleetReport) -> RenderableType:
    """Return the whole view."""
    count = len(report.members)
    head = Text(f"{count} gateway{'' if count == 1 else 's'}", "bold")
    head.append("" if report.shared else ", which shares no Redis with others", "not bold")
    for number, noun in ((report.versions, "versions"), (report.configurations, "configurations")):
        if number > 1:
            head.append(f" · {number} {noun}", "bold yellow")
    if report.problem:
        head.append(f" · {plain(report.problem)}", "bold red")
    return Group(head, Text(), fleet_table(report))


def fleet_table(report: FleetReport) -> Table:
    """Return the gateways by name."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in COLUMNS:
        name = column.removeprefix("#")
        table.add_column(name, justify="left" if name == column else "right", overflow="fold")
    for member in report.members:
        load = member.load
        table.add_row(
            Text(plain(member.name)),
            Text(member.state.replace("_", " "), STYLES.get(member.state, "bold red")),
            _marked(member.version, is_odd="version" in member.differs),
            _marked(member.configuration, is_odd=bool(set(member.differs) - {"version"})),
            span(member.uptime_s),
            str(member.workers),
            short(load.calls_per_s),
            str(load.calls_in_flight),
            str(load.queued_inputs),
            Text(plain("; ".join(_notes(member))) or NONE),
        )
    return table


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
