"""Tables of a status snapshot for a terminal. Values from the gateway are shown as text, never as markup."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

from gateway.cli.formats import NONE, milliseconds, short, size, span
from gateway.cli.printable import plain
from gateway.telemetry.snapshot import (
    CheckpointStatus,
    ModelUpstreamStatus,
    Rates,
    ReplicaStatus,
    Snapshot,
)

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
Row: TypeAlias = Sequence[str | Text]


def problem_table(problems: Sequence[tuple[str, str, str]]) -> Table:
    """Return the first problems, and how many more there are."""
    rows: list[Row] = [(subject, _state(state), reason) for subject, state, reason in problems]
    if len(rows) > PROBLEMS_SHOWN:
        rows[PROBLEMS_SHOWN:] = [(f"and {len(rows) - PROBLEMS_SHOWN} more", "", "")]
    return _table(("of", "state", "why"), rows)


def lane_table(snapshot: Snapshot, rates: Rates | None, *, is_wide: bool) -> Table:
    """Return the queues and the batches in flight."""
    rows = []
    for lane in snapshot.lanes:
        oldest = milliseconds(lane.oldest_s) if lane.queued_inputs else NONE
        queue = (str(lane.queued_inputs), short(lane.queued_tokens), oldest)
        p50 = milliseconds(rates.attempts_p50_s.get(lane.upstream) if rates else None)
        rows.append((lane.upstream, *queue, str(lane.in_flight_batches), str(lane.window_batches), p50))
    columns = ("upstream", "#waiting", "#tokens", "#oldest", "#in flight", "#window", "#attempt p50")
    return _table(columns, rows, () if is_wide else ("#tokens", "#window"))


def replica_table(snapshot: Snapshot, *, is_wide: bool) -> Table:
    """Return the replicas with states and attempts."""
    rows: list[Row] = [
        (
            replica.upstream,
            replica.name,
            _state(replica.state),
            *_numbers(replica, snapshot.at_s),
            replica.reason,
        )
        for replica in snapshot.replicas
    ]
    columns = ("upstream", "replica", "state", "#for", "#in flight", "#window", "#latency", "#attempts")
    # The reasons of what is wrong are among the problems.
    hidden = () if is_wide else ("#in flight", "#window", "#attempts", "why")
    return _table((*columns, "#failed", "why"), rows, hidden)


def _numbers(replica: ReplicaStatus, now_s: float) -> Iterator[str]:
    yield NONE if replica.since_s is None else span(now_s - replica.since_s)
    yield str(replica.in_flight_batches)
    yield str(replica.window_batches)
    yield milliseconds(replica.latency_s)
    yield f"{replica.attempts:,}"
    yield f"{replica.failed:,}"


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
    return _table(columns, rows, () if is_wide else ("operations", "vector space"))


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
    return _table(columns, rows, () if is_wide else ("#priority", "#cosine"))


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
    return _table(columns, rows, () if is_wide else ("kind", "upstream", "device"))


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
    return _table(
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
    return _table(columns, rows, () if is_wide else ("#refused/s", "#calls"))


def change_table(snapshot: Snapshot) -> Table:
    """Return the recent changes."""
    rows: list[Row] = [
        (time.strftime("%H:%M:%S", time.localtime(change.at_s)), change.subject, change.what, change.reason)
        for change in snapshot.changes[:CHANGES_SHOWN]
    ]
    return _table(("at", "of", "now", "why"), rows)


def _table(columns: Sequence[str], rows: Iterable[Row], hidden: Collection[str] = ()) -> Table:
    """Return a table. A column whose name begins with `#` has numbers. hidden: columns to leave out."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = [index for index, name in enumerate(columns) if name not in hidden]
    for index in shown:
        name = columns[index].removeprefix("#")
        if name == columns[index]:
            # A header is never broken inside a word.
            table.add_column(name, overflow="fold", min_width=len(name))
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row[index] for index in shown]
        table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells))
    return table


def _state(state: str) -> Text:
    return Text(plain(state), STYLES.get(state, "yellow"))


def _standing(upstream: ModelUpstreamStatus) -> Text:
    """Return the standing, which is no good news of an upstream without a replica in use."""
    is_idle = upstream.standing == "serving" and upstream.state != "ready"
    return Text(upstream.standing) if is_idle else _state(upstream.standing)
