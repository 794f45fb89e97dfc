"""A snapshot as a person reads it on a terminal. What a gateway tells is put in as text, never as markup."""

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
    """All of it. problem: why there is nothing new."""
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
    told = [f"version {plain(snapshot.version)}", f"up {span(snapshot.uptime_s)}"]
    if snapshot.workers > 1:
        told.append(f"{snapshot.workers} workers, told by number {snapshot.worker}")
    head.append(" · " + " · ".join(told), "default not bold")
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
    told = Text()
    for name, value in (
        ("calls/s", short(rates.calls if rates else None)),
        ("tokens/s", short(rates.tokens if rates else None)),
        ("p50", milliseconds(rates.p50_s if rates else None)),
        ("p95", milliseconds(rates.p95_s if rates else None)),
        ("in flight", str(snapshot.calls_in_flight)),
    ):
        told.append(f"{name} ", "dim").append(f"{value}   ", "bold")
    failures = rates.failures if rates else {}
    for kind, rate in failures.items():
        told.append(f"{plain(kind)} {short(rate)}/s   ", "bold red")
    return told


def _lanes(snapshot: Snapshot, rates: Rates | None) -> Table:
    table = _table(("upstream",), ("waiting", "tokens", "oldest", "in flight", "window", "attempt p50"))
    for one in snapshot.lanes:
        oldest = milliseconds(one.oldest_s) if one.queued_inputs else NONE
        waiting = (str(one.queued_inputs), short(one.queued_tokens), oldest)
        p50 = milliseconds(rates.attempts_p50_s.get(one.upstream) if rates else None)
        _row(table, one.upstream, *waiting, str(one.in_flight_batches), str(one.window_batches), p50)
    return table


def _replicas(snapshot: Snapshot) -> Table:
    numbers = ("for", "in flight", "window", "latency", "attempts", "failed")
    table = _table(("upstream", "replica", "state"), numbers, ("why",))
    for one in snapshot.replicas:
        _row(table, one.upstream, one.name, _state(one.state), *_numbers(one, snapshot.at_s), one.reason)
    return table


def _numbers(one: ReplicaStatus, now_s: float) -> Iterator[str]:
    yield NONE if one.since_s is None else span(now_s - one.since_s)
    yield str(one.in_flight_batches)
    yield str(one.window_batches)
    yield milliseconds(one.latency_s)
    yield f"{one.attempts:,}"
    yield f"{one.failed:,}"


def _models(snapshot: Snapshot) -> Table:
    table = _table(("model", "upstream", "state", "operations"), ("width",), ("vector space",))
    for one in snapshot.models:
        width = NONE if one.dimensions is None else str(one.dimensions)
        told = (_state(one.state), ", ".join(one.operations), width, one.fingerprint or NONE)
        _row(table, one.name, one.upstream, *told)
    return table


def _tenants(snapshot: Snapshot, rates: Rates | None) -> Table:
    table = _table(("tenant",), ("calls/s", "tokens/s", "refused/s", "calls", "tokens", "refused"))
    for one in snapshot.tenants:
        own = rates.tenants.get(one.name) if rates else None
        now = [short(rate) for rate in ((own.calls, own.tokens, own.refused) if own else (None,) * 3)]
        _row(table, one.name, *now, f"{one.calls:,}", short(one.tokens), f"{one.refused:,}")
    return table


def _changes(snapshot: Snapshot) -> Table:
    table = _table(("at", "of", "now", "why"))
    for one in snapshot.changes[:CHANGES_SHOWN]:
        _row(table, time.strftime("%H:%M:%S", time.localtime(one.at_s)), one.subject, one.what, one.reason)
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
    """Without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def short(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return NONE
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Three digits or so."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def span(seconds: float) -> str:
    """How long, in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
