"""View of a status snapshot for a terminal: what is wrong, then the tables."""

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli import status_tables as tables
from gateway.cli.formats import NONE, milliseconds, short, span
from gateway.cli.printable import plain
from gateway.events import tenants_and_keys
from gateway.telemetry.snapshot import ModelStatus, Rates, ReplicaStatus, Snapshot, StoreStatus

GOOD = frozenset(("up", "ready"))
BAD_STANDINGS = frozenset(("refused", "withdrawn"))
# Below this width tables have only the columns that a person looks at first.
WIDE_FROM = 110


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
    return head.append(" · ").append_text(_store(snapshot.store))


def _store(store: StoreStatus) -> Text:
    kind = f"quotas in {plain(store.kind)}"
    return Text(f"{kind}, AWAY", "bold red") if store.away else Text(kind, "not bold")


def _body(snapshot: Snapshot, rates: Rates | None, *, is_wide: bool) -> Iterator[RenderableType]:
    yield _figures(snapshot, rates)
    if problems := list(_problems(snapshot)):
        yield from _titled("problems", tables.problem_table(problems))
    yield from _titled("lanes", tables.lane_table(snapshot, rates, is_wide=is_wide))
    yield from _titled("replicas", tables.replica_table(snapshot, is_wide=is_wide))
    yield from _titled("models", tables.model_table(snapshot, is_wide=is_wide))
    if any(model.upstreams for model in snapshot.models):
        yield from _titled("models with several upstreams", tables.group_table(snapshot, is_wide=is_wide))
    if snapshot.instances:
        yield from _titled("instances", tables.instance_table(snapshot, is_wide=is_wide))
    if snapshot.registry:
        yield from _titled("models on this host", tables.checkpoint_table(snapshot, is_wide=is_wide))
    yield from _titled("tenants", tables.tenant_table(snapshot, rates, is_wide=is_wide))
    if snapshot.changes:
        yield from _titled("changes", tables.change_table(snapshot))


def _problems(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yield what is not as it should be: subject, state and reason."""
    if snapshot.store.away:
        effect = "requests are counted without the store"
        reason = ": ".join(filter(None, (snapshot.store.reason, effect)))
        yield f"quotas in {snapshot.store.kind}", "unavailable", reason
    yield from _losses(snapshot)
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


def _losses(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yield the loss of the store's tenants and keys, while they are still valid."""
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
