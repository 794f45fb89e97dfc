"""Tables of a status snapshot for a terminal. Values from the gateway are shown as text, never as markup."""

import time
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.telemetry.snapshot import Rates, ReplicaStatus, Snapshot, StoreStatus

STYLES = {
    "up": "green",
    "ready": "green",
    "down": "bold red",
    "refused": "bold red",
    "unavailable": "bold red",
}
CHANGES_SHOWN = 8
NONE = "–"


def view(url: str, snapshot: Snapshot | None, rates: Rates | None, problem: str) -> RenderableType:
    """Return the whole view. problem: why there is no new snapshot."""
    parts: list[RenderableType] = [_head(url, snapshot)]
    if problem:
        seen = "not seen yet" if snapshot is None else f"last seen {span(time.time() - snapshot.at_s)} ago"
        parts.append(Text(f"{plain(problem)} · {seen} · asking again", "bold red"))
    if snapshot is not None:
        parts += _body(snapshot, rates)
    return Group(*parts)


def _head(url: str, snapshot: Snapshot | None) -> Text:
    head = Text("gateway ", "bold").append(plain(url), "cyan")
    if snapshot is None:
        return head
    facts = [f"version {plain(snapshot.version)}", f"up {span(snapshot.uptime_s)}"]
    if snapshot.workers > 1:
        facts.append(f"{snapshot.workers} workers, reported by number {snapshot.worker}")
    head.append(" · " + " · ".join(facts), "default not bold")
    return head.append(" · ").append_text(_store(snapshot.store))


def _store(store: StoreStatus) -> Text:
    kind = f"quotas in {plain(store.kind)}"
    return Text(f"{kind}, AWAY", "bold red") if store.away else Text(kind, "not bold")


def _body(snapshot: Snapshot, rates: Rates | None) -> Iterator[RenderableType]:
    yield _figures(snapshot, rates)
    yield from _titled("lanes", _lanes(snapshot, rates))
    yield from _titled("replicas", _replicas(snapshot))
    yield from _titled("models", _models(snapshot))
    yield from _titled("tenants", _tenants(snapshot, rates))
    if snapshot.changes:
        yield from _titled("changes", _changes(snapshot))


def _titled(title: str, table: Table) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, "bold underline")
    yield table


def _figures(snapshot: Snapshot, rates: Rates | None) -> Text:
    figures = Text()
    for name, value in (
        ("calls/s", short(rates.calls if rates else None)),
        ("tokens/s", short(rates.tokens if rates else None)),
        ("p50", milliseconds(rates.p50_s if rates else None)),
        ("p95", milliseconds(rates.p95_s if rates else None)),
        ("in flight", str(snapshot.calls_in_flight)),
    ):
        figures.append(f"{name} ", "dim").append(f"{value}   ", "bold")
    failures = rates.failures if rates else {}
    for kind, rate in failures.items():
        figures.append(f"{plain(kind)} {short(rate)}/s   ", "bold red")
    return figures


def _lanes(snapshot: Snapshot, rates: Rates | None) -> Table:
    table = _table(("upstream",), ("waiting", "tokens", "oldest", "in flight", "window", "attempt p50"))
    for lane in snapshot.lanes:
        oldest = milliseconds(lane.oldest_s) if lane.queued_inputs else NONE
        queue = (str(lane.queued_inputs), short(lane.queued_tokens), oldest)
        p50 = milliseconds(rates.attempts_p50_s.get(lane.upstream) if rates else None)
        _row(table, lane.upstream, *queue, str(lane.in_flight_batches), str(lane.window_batches), p50)
    return table


def _replicas(snapshot: Snapshot) -> Table:
    numbers = ("for", "in flight", "window", "latency", "attempts", "failed")
    table = _table(("upstream", "replica", "state"), numbers, ("why",))
    for replica in snapshot.replicas:
        cells = _numbers(replica, snapshot.at_s)
        _row(table, replica.upstream, replica.name, _state(replica.state), *cells, replica.reason)
    return table


def _numbers(replica: ReplicaStatus, now_s: float) -> Iterator[str]:
    yield NONE if replica.since_s is None else span(now_s - replica.since_s)
    yield str(replica.in_flight_batches)
    yield str(replica.window_batches)
    yield milliseconds(replica.latency_s)
    yield f"{replica.attempts:,}"
    yield f"{replica.failed:,}"


def _models(snapshot: Snapshot) -> Table:
    table = _table(("model", "upstream", "state", "operations"), ("width",), ("vector space",))
    for model in snapshot.models:
        width = NONE if model.dimensions is None else str(model.dimensions)
        operations, fingerprint = ", ".join(model.operations), model.fingerprint or NONE
        _row(table, model.name, model.upstream, _state(model.state), operations, width, fingerprint)
    return table


def _tenants(snapshot: Snapshot, rates: Rates | None) -> Table:
    table = _table(("tenant",), ("calls/s", "tokens/s", "refused/s", "calls", "tokens", "refused"))
    for tenant in snapshot.tenants:
        rate = rates.tenants.get(tenant.name) if rates else None
        per_second = (rate.calls, rate.tokens, rate.refused) if rate else (None,) * 3
        totals = (f"{tenant.calls:,}", short(tenant.tokens), f"{tenant.refused:,}")
        _row(table, tenant.name, *map(short, per_second), *totals)
    return table


def _changes(snapshot: Snapshot) -> Table:
    table = _table(("at", "of", "now", "why"))
    for change in snapshot.changes[:CHANGES_SHOWN]:
        at = time.strftime("%H:%M:%S", time.localtime(change.at_s))
        _row(table, at, change.subject, change.what, change.reason)
    return table


def _table(texts: Iterable[str], numbers: Iterable[str] = (), last: Iterable[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells))


def _state(state: str) -> Text:
    return Text(plain(state), STYLES.get(state, "yellow"))


def plain(text: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def short(value: float | None) -> str:
    """Format a number with about three digits."""
    if value is None:
        return NONE
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Format a duration with about three digits."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def span(seconds: float) -> str:
    """Format a duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
