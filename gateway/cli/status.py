"""`gateway status`: show the state of a running gateway, on a terminal or as JSON."""

import argparse
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Event

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from gateway.cli.fleet import PATH as FLEET_PATH
from gateway.cli.fleet import fleet_view
from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable
from gateway.cli.operator_options import add_operator_options, ask_gateway
from gateway.cli.output import NONE, PIPE_WIDTH, Row, milliseconds, print_json, short, size, span, table_of
from gateway.cli.printable import plain
from gateway.events import tenants_and_keys
from gateway.fleet.members import FleetReport
from gateway.telemetry.snapshot import (
    CheckpointStatus,
    LaneStatus,
    ModelStatus,
    ModelUpstreamStatus,
    Rates,
    ReplicaStatus,
    Snapshot,
    rates_between,
)

POLL_EVERY_S = 1.0
PATH = "/admin/status"
GOOD = frozenset(("up", "ready"))
BAD_STANDINGS = frozenset(("refused", "withdrawn"))
# Below this width tables have only the columns that a person looks at first.
WIDE_FROM = 110
STYLES = {
    "up": "green",
    "running": "green",
    "verified": "green",
    "downloaded": "green",
    "failed": "bold red",
    "ready": "green",
    "down": "bold red",
    "refused": "bold red",
    "unavailable": "bold red",
    "canary_only": "bold red",
    "serving": "green",
    "withdrawn": "bold red",
}
# States of models on the host that an operator looks for first; others follow by name.
FIRST = {"failed": 0, "downloading": 1, "loading": 1}
CHANGES_SHOWN = 8
PROBLEMS_SHOWN = 8
CHECKPOINTS_SHOWN = 12


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
    add_operator_options(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the status with the rates of one second, and exit"
    )
    parser.add_argument(
        "--fleet", action="store_true", help="print all gateways that share its Redis, and exit"
    )


def run_status(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the status; return 1 if the gateway cannot be reached or refuses the request."""

    def show(client: GatewayClient, url: str) -> None:
        if options.fleet:
            _show_fleet(client, as_json=options.json)
        elif options.json:
            print_json(client.get(PATH, Snapshot))
        elif options.once or not Console().is_terminal:
            _show_once(client, StatusDisplay(url))
        else:
            _follow(client, StatusDisplay(url))

    try:
        return ask_gateway(options, environment, show)
    except KeyboardInterrupt:
        return 0


def _show_fleet(client: GatewayClient, *, as_json: bool) -> None:
    """Print the gateways that share a Redis. Raises: GatewayUnavailable, RequestRefused."""
    report = client.get(FLEET_PATH, FleetReport)
    if as_json:
        print_json(report)
        return
    console = Console()
    Console(width=None if console.is_terminal else PIPE_WIDTH).print(fleet_view(report))


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


def view(
    url: str, snapshot: Snapshot | None, rates: Rates | None, problem: str, width: int
) -> RenderableType:
    """Return the whole view. problem: why there is no new snapshot. width: of the terminal."""
    parts: list[RenderableType] = [_head(url, snapshot)]
    if problem:
        seen = "not seen yet" if snapshot is None else f"last seen {span(time.time() - snapshot.at_s)} ago"
        parts.append(Text(f"{plain(problem)} · {seen} · asking again", "bold red"))
    if snapshot is not None:
        parts += _body(snapshot, rates, is_wide=width >= WIDE_FROM)
    return Group(*parts)


def _head(url: str, snapshot: Snapshot | None) -> Text:
    head = Text("gateway ", "bold").append(plain(url), "cyan")
    if snapshot is None:
        return head
    facts = [f"version {plain(snapshot.version)}", f"up {span(snapshot.uptime_s)}"]
    if snapshot.workers > 1:
        facts.append(f"{snapshot.workers} workers, reported by number {snapshot.worker}")
    head.append(" · " + " · ".join(facts), "default not bold")
    kind, is_away = f"quotas in {plain(snapshot.store.kind)}", snapshot.store.away
    return head.append(" · ").append(
        f"{kind}, AWAY" if is_away else kind, "bold red" if is_away else "not bold"
    )


def _body(snapshot: Snapshot, rates: Rates | None, *, is_wide: bool) -> Iterator[RenderableType]:
    yield _figures(snapshot, rates)
    if problems := list(_problems(snapshot)):
        yield from _titled("problems", problem_table(problems))
    yield from _titled("lanes", lane_table(snapshot, rates, is_wide=is_wide))
    yield from _titled("replicas", replica_table(snapshot, is_wide=is_wide))
    yield from _titled("models", model_table(snapshot, is_wide=is_wide))
    if any(model.upstreams for model in snapshot.models):
        yield from _titled("models with several upstreams", group_table(snapshot, is_wide=is_wide))
    if snapshot.instances:
        yield from _titled("instances", instance_table(snapshot, is_wide=is_wide))
    if snapshot.registry:
        yield from _titled("models on this host", checkpoint_table(snapshot, is_wide=is_wide))
    yield from _titled("tenants", tenant_table(snapshot, rates, is_wide=is_wide))
    if snapshot.changes:
        yield from _titled("changes", change_table(snapshot))


def _problems(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yield what is not as it should be: subject, state and reason."""
    yield from _of_gateway(snapshot)
    for replica in snapshot.replicas:
        # On probation it serves, and a failure takes it down.
        if replica.state not in GOOD and (replica.state != "probation" or replica.is_drained):
            yield f"{replica.upstream} {replica.name}", replica.state, _why(replica, snapshot.at_s)
    for model in snapshot.models:
        if model.state not in GOOD:
            yield f"model {model.name}", model.state, _why_model(model)
        for upstream in model.upstreams:
            if upstream.standing in BAD_STANDINGS:
                yield f"model {model.name} on {upstream.name}", upstream.standing, upstream.reason
    yield from _failures(snapshot)


def _of_gateway(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yield a drain of this gateway, an outage of its store, and what the store has lost."""
    if snapshot.drained_since_s is not None:
        since = span(snapshot.at_s - snapshot.drained_since_s)
        yield "this gateway", "drained", f"for {since}: `gateway drain --undo` puts it back"
    if snapshot.store.away:
        effect = "requests are counted without the store"
        reason = ": ".join(filter(None, (snapshot.store.reason, effect)))
        yield f"quotas in {snapshot.store.kind}", "unavailable", reason
    if (loss := snapshot.store.loss) is not None:
        lost = f"{tenants_and_keys(loss.tenants, loss.keys)} ({loss.reason})"
        left = f"they are refused in {span(max(0.0, loss.until_s - snapshot.at_s))} unless they are restored"
        yield f"tenants in {snapshot.store.kind}", "lost", f"{lost}: {left}"


def _why(replica: ReplicaStatus, now_s: float) -> str:
    """Return for how long a replica has been in its state, and why; unknown before its first change."""
    since = "" if replica.since_s is None else f"for {span(now_s - replica.since_s)}"
    return ": ".join(filter(None, (since, replica.reason)))


def _why_model(model: ModelStatus) -> str:
    """Return why a model does not serve all calls."""
    if model.state == "canary_only":
        return f"upstream {model.upstream} has no replica in use, and the canary takes its share only"
    return f"upstream {model.upstream}"


def _failures(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yield the instances and downloads that failed."""
    for instance in snapshot.instances:
        if instance.status == "failed":
            yield f"instance {instance.name}", instance.status, instance.reason or NONE
    for checkpoint in snapshot.registry:
        if checkpoint.state == "failed":
            yield checkpoint.model, checkpoint.state, checkpoint.error or NONE


def _titled(title: str, table: Table) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, "bold underline")
    yield table


def _figures(snapshot: Snapshot, rates: Rates | None) -> Text:
    figures = Text()
    for name, value in (
        ("calls/s", short(rates.calls if rates else None)),
        ("tokens/s", short(rates.tokens if rates else None)),
        ("interactive p50", milliseconds(rates.p50_s if rates else None)),
        ("p95", milliseconds(rates.p95_s if rates else None)),
        ("calls in flight", str(snapshot.calls_in_flight)),
    ):
        figures.append(f"{name} ", "dim").append(f"{value}   ", "bold")
    failures = rates.failures if rates else {}
    for kind, rate in failures.items():
        figures.append(f"{plain(kind)} {short(rate)}/s   ", "bold red")
    return figures


def problem_table(problems: Sequence[tuple[str, str, str]]) -> Table:
    """Return the first problems, and how many more there are."""
    rows: list[Row] = [(subject, _state(state), reason) for subject, state, reason in problems]
    if len(rows) > PROBLEMS_SHOWN:
        rows[PROBLEMS_SHOWN:] = [(f"and {len(rows) - PROBLEMS_SHOWN} more", "", "")]
    return table_of(("of", "state", "why"), rows)


def lane_table(snapshot: Snapshot, rates: Rates | None, *, is_wide: bool) -> Table:
    """Return the queues and the batches in flight."""
    rows: list[Row] = []
    for lane in snapshot.lanes:
        oldest = milliseconds(lane.oldest_s) if lane.queued_inputs else NONE
        queue = (str(lane.queued_inputs), short(lane.queued_tokens), oldest)
        p50 = milliseconds(rates.attempts_p50_s.get(lane.upstream) if rates else None)
        rows.append((lane.upstream, *queue, str(lane.in_flight_batches), str(lane.window_batches), p50))
    columns: tuple[str, ...] = (
        *("upstream", "#waiting", "#tokens", "#oldest", "#in flight", "#window", "#attempt p50"),
    )
    if any(lane.limits for lane in snapshot.lanes):
        columns = (*columns, "account")
        rows = [(*row, _limits(lane)) for row, lane in zip(rows, snapshot.lanes, strict=True)]
    return table_of(columns, rows, () if is_wide else ("#tokens", "#window"))


def _limits(lane: LaneStatus) -> str:
    """Return the limits of an upstream's account, with their used shares."""
    return ", ".join(f"{limit.used_ratio:.0%} of {limit.name}" for limit in lane.limits) or NONE


def replica_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the replicas with states and attempts."""
    rows: list[Row] = [
        (
            replica.upstream,
            replica.name,
            _state(replica.state),
            NONE if replica.since_s is None else span(snapshot.at_s - replica.since_s),
            str(replica.in_flight_batches),
            str(replica.window_batches),
            milliseconds(replica.latency_s),
            f"{replica.attempts:,}",
            f"{replica.failed:,}",
            replica.reason,
        )
        for replica in snapshot.replicas
    ]
    columns = ("upstream", "replica", "state", "#for", "#in flight", "#window", "#latency", "#attempts")
    # The reasons of what is wrong are among the problems.
    hidden = () if is_wide else ("#in flight", "#window", "#attempts", "why")
    return table_of((*columns, "#failed", "why"), rows, hidden)


def model_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the models with states and vector spaces."""
    rows: list[Row] = [
        (
            model.name,
            model.upstream_names,
            _state(model.state),
            ", ".join(model.operations),
            NONE if model.dimensions is None else str(model.dimensions),
            model.fingerprint or NONE,
        )
        for model in snapshot.models
    ]
    columns = ("model", "upstream", "state", "operations", "#width", "vector space")
    return table_of(columns, rows, () if is_wide else ("operations", "vector space"))


def group_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the upstreams of models that have several, with their shares."""
    rows: list[Row] = [
        (
            model.name,
            upstream.name,
            upstream.role,
            _standing(upstream),
            _state(upstream.state),
            f"{upstream.share:.3g}" if upstream.share is not None else str(upstream.weight),
            NONE if upstream.priority is None else str(upstream.priority),
            f"{upstream.calls:,}",
            NONE if upstream.cosine is None else f"{upstream.cosine:.4f}",
        )
        for model in snapshot.models
        for upstream in model.upstreams
    ]
    columns = ("model", "upstream", "role", "standing", "state", "#share", "#priority", "#calls", "#cosine")
    return table_of(columns, rows, () if is_wide else ("#priority", "#cosine"))


def instance_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the model servers on the host."""
    rows: list[Row] = [
        (
            instance.name,
            instance.kind,
            instance.model_id,
            instance.upstream,
            _state(instance.status),
            NONE if instance.pid is None else str(instance.pid),
            str(instance.restarts),
            instance.device or NONE,
        )
        for instance in snapshot.instances
    ]
    columns = ("instance", "kind", "loads", "upstream", "state", "#pid", "#restarts", "device")
    return table_of(columns, rows, () if is_wide else ("kind", "upstream", "device"))


def checkpoint_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the models of the Hub on this host, those that need attention first."""
    found = sorted(
        snapshot.registry, key=lambda checkpoint: (FIRST.get(checkpoint.state, 2), checkpoint.model)
    )
    rows: list[Row] = [
        (
            checkpoint.model,
            _state(checkpoint.state),
            _progress(checkpoint),
            size(checkpoint.stored_bytes),
            ", ".join(checkpoint.upstreams) or NONE,
        )
        for checkpoint in found[:CHECKPOINTS_SHOWN]
    ]
    if len(found) > len(rows):
        rows.append((f"and {len(found) - len(rows)} more", "", "", "", ""))
    return table_of(
        ("model", "state", "#download", "#on disk", "upstreams"), rows, () if is_wide else ("upstreams",)
    )


def _progress(checkpoint: CheckpointStatus) -> str:
    if checkpoint.state != "downloading":
        return NONE
    done, total = checkpoint.done_bytes or 0, checkpoint.total_bytes
    share = size(done) if not total else f"{100 * done / total:.0f} % of {size(total)}"
    return f"{share}, {size(checkpoint.bytes_per_s or 0)}/s"


def tenant_table(snapshot: Snapshot, rates: Rates | None, *, is_wide: bool) -> Table:
    """Return the rates and totals of tenants."""
    rows = []
    for tenant in snapshot.tenants:
        rate = rates.tenants.get(tenant.name) if rates else None
        per_second = (rate.calls, rate.tokens, rate.refused) if rate else (None,) * 3
        totals = (f"{tenant.calls:,}", short(tenant.tokens), f"{tenant.refused:,}")
        rows.append((tenant.name, *map(short, per_second), *totals))
    columns = ("tenant", "#calls/s", "#tokens/s", "#refused/s", "#calls", "#tokens", "#refused")
    return table_of(columns, rows, () if is_wide else ("#refused/s", "#calls"))


def change_table(snapshot: Snapshot) -> Table:
    """Return the recent changes."""
    rows: list[Row] = [
        (time.strftime("%H:%M:%S", time.localtime(change.at_s)), change.subject, change.what, change.reason)
        for change in snapshot.changes[:CHANGES_SHOWN]
    ]
    return table_of(("at", "of", "now", "why"), rows)


def _state(state: str) -> Text:
    return Text(plain(state), STYLES.get(state, "yellow"))


def _standing(upstream: ModelUpstreamStatus) -> Text:
    """Return the standing, which is no good news of an upstream without a replica in use."""
    is_idle = upstream.standing == "serving" and upstream.state != "ready"
    return Text(upstream.standing) if is_idle else _state(upstream.standing)
