"""Rates between two snapshots, totals of the metrics, and the history of changes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.events import (
    AttemptFinished,
    CallFinished,
    QuotaDecided,
    ReplicaChanged,
    SpaceChecked,
    StoreChanged,
)
from gateway.telemetry.history import CHANGES_MAX, ChangeHistory
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.snapshot import (
    CallsStatus,
    Durations,
    LaneStatus,
    Snapshot,
    StoreStatus,
    TenantStatus,
    during,
    quantile,
    rates_between,
)
from gateway.telemetry.totals import Totals

BOUNDS = (0.01, 0.1, 1.0)


def durations(*counts: float) -> Durations:
    return Durations(BOUNDS, counts)


def snapshot(at_s: float, outcomes: dict[str, int], call_durations: Durations, tenants: int = 0) -> Snapshot:
    return Snapshot(
        "1",
        at_s,
        1.0,
        0,
        1,
        0,
        0,
        StoreStatus("memory", away=False),
        CallsStatus(outcomes, call_durations),
        (LaneStatus("up", 0, 0, 0.0, 0, 6, call_durations),),
        (),
        (),
        (TenantStatus("acme", tenants, tenants, 10 * tenants, 0),),
        (),
    )


def test_rates_are_increments_per_second() -> None:
    before = snapshot(10, {"ok": 4}, durations(4, 4, 4, 4), tenants=4)
    after = snapshot(12, {"ok": 10, "overloaded": 4}, durations(4, 14, 14, 14), tenants=10)
    rates = rates_between(before, after)

    assert rates is not None
    assert (5, 30, {"overloaded": 2}) == (rates.calls, rates.tokens, rates.failures)
    assert (3, 30, 0) == (
        rates.tenants["acme"].calls,
        rates.tenants["acme"].tokens,
        rates.tenants["acme"].refused,
    )
    # Ten calls took between 10 and 100 ms; the median is interpolated half-way.
    assert pytest.approx(0.055) == rates.p50_s == rates.attempts_p50_s["up"]


def test_latency_is_that_of_interactive_calls() -> None:
    def with_bulk(at_s: float, interactive: int, bulk: int) -> Snapshot:
        every = durations(0, interactive, interactive, interactive + bulk)
        calls = CallsStatus({"ok": interactive + bulk}, every, durations(0, 0, 0, bulk))
        return msgspec.structs.replace(snapshot(at_s, {}, every), calls=calls)

    rates = rates_between(with_bulk(10, 2, 5), with_bulk(12, 12, 95))
    only_bulk = rates_between(with_bulk(10, 2, 5), with_bulk(12, 2, 95))

    assert rates is not None
    assert only_bulk is not None
    assert (50, pytest.approx(0.055)) == (rates.calls, rates.p50_s)
    assert (45, None) == (only_bulk.calls, only_bulk.p50_s)


def test_rates_count_everything_after_a_restart() -> None:
    before = snapshot(10, {"ok": 400}, durations(400, 400, 400, 400), tenants=400)
    rates = rates_between(before, snapshot(11, {"ok": 3}, durations(0, 0, 3, 3), tenants=3))

    assert rates is not None
    assert (3, 30) == (rates.calls, rates.tokens)
    assert rates.p50_s is not None
    assert 0.1 < rates.p50_s < 1


@pytest.mark.parametrize("at_s", [9.0, 10.0])
def test_snapshots_without_elapsed_time_have_no_rates(at_s: float) -> None:
    earlier = snapshot(10, {"ok": 1}, durations(1, 1, 1, 1))

    assert rates_between(earlier, msgspec.structs.replace(earlier, at_s=at_s)) is None


def test_quantile_without_calls_is_none() -> None:
    assert quantile(Durations(), 0.5) is None
    assert quantile(during(durations(1, 2, 3, 3), durations(1, 2, 3, 3)), 0.5) is None


def test_quantile_above_the_last_bound_is_the_last_bound() -> None:
    assert quantile(durations(0, 0, 0, 5), 0.95) == 1.0


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1), st.floats(0.01, 1))
def test_quantiles_increase_with_their_share_within_the_bounds(
    counts: list[int], first_share: float, second_share: float
) -> None:
    cumulative = durations(*(sum(counts[: index + 1]) for index in range(4)))
    low, high = sorted((first_share, second_share))
    least, most = quantile(cumulative, low), quantile(cumulative, high)

    if not sum(counts):
        assert least is most is None
        return
    assert least is not None
    assert most is not None
    assert 0 <= least <= most <= BOUNDS[-1]


async def test_totals_exclude_calls_to_operator_routes() -> None:
    metrics = Metrics(is_open=True)
    for route in ("/v1/embeddings", "/admin/status", "/ui/page.js", "/metrics", "/livez", "/health"):
        metrics.observe(CallFinished("id", "GET", route, 200, "ok", 0.02))
    calls = Totals(metrics.collected()).calls()

    assert calls.outcomes == {"ok": 1}
    assert calls.durations.counts[-1] == 1
    assert pytest.approx(0.02) == calls.durations.sum_s


async def test_totals_list_tenants_with_calls_or_refusals() -> None:
    metrics = Metrics(is_open=True)
    metrics.observe(CallFinished("id", "POST", "/embed", 200, "ok", 0.1, "acme", "bge", 2, 7))
    metrics.observe(CallFinished("id", "POST", "/embed", 200, "ok", 0.1, "acme", "other", 1, 3))
    metrics.observe(QuotaDecided("acme", "admitted"))
    metrics.observe(QuotaDecided("zeta", "refused"))

    assert (TenantStatus("acme", 2, 3, 10, 0), TenantStatus("zeta", 0, 0, 0, 1)) == Totals(
        metrics.collected()
    ).tenants()


def test_lists_changes_newest_first_up_to_a_maximum() -> None:
    now_s = 0.0
    history = ChangeHistory(lambda: now_s)
    for number in range(3 * CHANGES_MAX):
        now_s = float(number)
        history.observe(ReplicaChanged("up", f"r{number}", "down", "why"))
    changes = history.changes()

    assert CHANGES_MAX == len(changes)
    assert ("up r149", "down", "why", 149.0) == (
        changes[0].subject,
        changes[0].what,
        changes[0].reason,
        changes[0].at_s,
    )


def test_reports_a_replicas_last_change_and_latency_of_successes() -> None:
    now_s = 5.0
    history = ChangeHistory(lambda: now_s)
    history.observe(ReplicaChanged("up", "r", "up", "ready"))
    for outcome, seconds in (("ok", 1.0), ("failed", 60.0), ("ok", 2.0)):
        history.observe(AttemptFinished("up", "r", outcome, seconds))
    replica = history.of("up", "r")

    assert (5.0, "ready") == (replica.since_s, replica.reason)
    assert pytest.approx(1.1) == replica.latency_s


def test_forgets_a_removed_replica() -> None:
    history = ChangeHistory(lambda: 5.0)
    history.observe(ReplicaChanged("up", "r", "up"))
    history.observe(ReplicaChanged("up", "r", "gone"))
    history.observe(AttemptFinished("up", "r", "ok", 1.0))

    assert history.of("up", "r").latency_s is None
    assert history.of("up", "r").since_s is None
    assert ["gone", "up"] == [change.what for change in history.changes()]


def test_records_store_outages_and_vectors_that_do_not_fit() -> None:
    history = ChangeHistory(lambda: 5.0)
    history.observe(StoreChanged(away=True, reason="no connection"))
    for outcome, changed in (("fits", True), ("differs", False), ("differs", True)):
        history.observe(SpaceChecked("up", "r", outcome, 0.5, "why", changed))

    assert [("up r", "vectors: differs"), ("quota store", "away")] == [
        (change.subject, change.what) for change in history.changes()
    ]


def test_forgets_a_removed_upstreams_replicas_but_not_its_changes() -> None:
    history = ChangeHistory(lambda: 5.0)
    for upstream in ("first", "second"):
        history.observe(ReplicaChanged(upstream, "a", "up"))
    history.forget("first")

    assert [None, 5.0] == [history.of(upstream, "a").since_s for upstream in ("first", "second")]
    assert 2 == len(history.changes())
