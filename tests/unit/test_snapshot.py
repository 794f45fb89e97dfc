"""Rates between two snapshots, what is read off the metrics, and what has changed of late."""

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
from gateway.telemetry.change_history import CHANGES_MAX, ChangeHistory
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


def snapshot(at_s: float, outcomes: dict[str, int], took: Durations, tenants: int = 0) -> Snapshot:
    return Snapshot(
        "1",
        at_s,
        1.0,
        0,
        1,
        0,
        0,
        StoreStatus("memory", away=False),
        CallsStatus(outcomes, took),
        (LaneStatus("one", 0, 0, 0.0, 0, 6, took),),
        (),
        (),
        (TenantStatus("acme", tenants, tenants, 10 * tenants, 0),),
        (),
    )


def test_rates_are_what_was_added_in_a_second() -> None:
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
    # Ten that took between 10 and 100 ms: the middle one half-way.
    assert pytest.approx(0.055) == rates.p50_s == rates.attempts_p50_s["one"]


def test_of_a_gateway_that_began_anew_all_counts() -> None:
    before = snapshot(10, {"ok": 400}, durations(400, 400, 400, 400), tenants=400)
    rates = rates_between(before, snapshot(11, {"ok": 3}, durations(0, 0, 3, 3), tenants=3))

    assert rates is not None
    assert (3, 30) == (rates.calls, rates.tokens)
    assert rates.p50_s is not None
    assert 0.1 < rates.p50_s < 1


@pytest.mark.parametrize("at_s", [9.0, 10.0])
def test_two_looks_at_one_moment_make_no_rate(at_s: float) -> None:
    told = snapshot(10, {"ok": 1}, durations(1, 1, 1, 1))

    assert rates_between(told, msgspec.structs.replace(told, at_s=at_s)) is None


def test_without_calls_there_is_no_quantile() -> None:
    assert quantile(Durations(), 0.5) is None
    assert quantile(during(durations(1, 2, 3, 3), durations(1, 2, 3, 3)), 0.5) is None


def test_what_took_longer_than_the_last_bound_is_told_as_that() -> None:
    assert quantile(durations(0, 0, 0, 5), 0.95) == 1.0


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1), st.floats(0.01, 1))
def test_quantiles_rise_with_their_share_and_stay_within_the_bounds(
    each: list[int], one: float, other: float
) -> None:
    told = durations(*(sum(each[: index + 1]) for index in range(4)))
    least, most = quantile(told, min(one, other)), quantile(told, max(one, other))

    if not sum(each):
        assert least is most is None
        return
    assert least is not None
    assert most is not None
    assert 0 <= least <= most <= BOUNDS[-1]


async def test_who_only_watches_is_none_of_the_calls() -> None:
    metrics = Metrics(is_open=True)
    for route in ("/v1/embeddings", "/admin/status", "/ui/page.js", "/metrics", "/livez", "/health"):
        metrics.observe(CallFinished("id", "GET", route, 200, "ok", 0.02))
    calls = Totals(metrics.collected()).calls()

    assert calls.outcomes == {"ok": 1}
    assert calls.durations.counts[-1] == 1
    assert pytest.approx(0.02) == calls.durations.sum_s


async def test_tenants_are_those_that_called_or_were_refused() -> None:
    metrics = Metrics(is_open=True)
    metrics.observe(CallFinished("id", "POST", "/embed", 200, "ok", 0.1, "acme", "bge", 2, 7))
    metrics.observe(CallFinished("id", "POST", "/embed", 200, "ok", 0.1, "acme", "other", 1, 3))
    metrics.observe(QuotaDecided("acme", "admitted"))
    metrics.observe(QuotaDecided("zeta", "refused"))

    assert (TenantStatus("acme", 2, 3, 10, 0), TenantStatus("zeta", 0, 0, 0, 1)) == Totals(
        metrics.collected()
    ).tenants()


def test_changes_are_told_newest_first_and_are_bounded() -> None:
    now_s = 0.0
    recent = ChangeHistory(lambda: now_s)
    for number in range(3 * CHANGES_MAX):
        now_s = float(number)
        recent.observe(ReplicaChanged("one", f"r{number}", "down", "why"))
    changes = recent.changes()

    assert CHANGES_MAX == len(changes)
    assert ("one r149", "down", "why", 149.0) == (
        changes[0].subject,
        changes[0].what,
        changes[0].reason,
        changes[0].at_s,
    )


def test_a_replica_is_known_by_its_last_change_and_its_good_attempts() -> None:
    now_s = 5.0
    recent = ChangeHistory(lambda: now_s)
    recent.observe(ReplicaChanged("one", "r", "up", "ready"))
    for outcome, took_s in (("ok", 1.0), ("failed", 60.0), ("ok", 2.0)):
        recent.observe(AttemptFinished("one", "r", outcome, took_s))
    standing = recent.of("one", "r")

    assert (5.0, "ready") == (standing.since_s, standing.reason)
    assert pytest.approx(1.1) == standing.latency_s


def test_a_replica_that_is_gone_is_forgotten() -> None:
    recent = ChangeHistory(lambda: 5.0)
    recent.observe(ReplicaChanged("one", "r", "up"))
    recent.observe(ReplicaChanged("one", "r", "gone"))
    recent.observe(AttemptFinished("one", "r", "ok", 1.0))

    assert recent.of("one", "r").latency_s is None
    assert recent.of("one", "r").since_s is None
    assert ["gone", "up"] == [one.what for one in recent.changes()]


def test_the_store_and_strays_are_changes_and_what_fits_is_none() -> None:
    recent = ChangeHistory(lambda: 5.0)
    recent.observe(StoreChanged(away=True, reason="no connection"))
    for outcome, changed in (("fits", True), ("differs", False), ("differs", True)):
        recent.observe(SpaceChecked("one", "r", outcome, 0.5, "why", changed))

    assert [("one r", "vectors: differs"), ("quota store", "away")] == [
        (one.subject, one.what) for one in recent.changes()
    ]


def test_an_upstream_that_is_no_more_has_no_standings_and_what_happened_to_it_stays_told() -> None:
    recent = ChangeHistory(lambda: 5.0)
    for upstream in ("one", "two"):
        recent.observe(ReplicaChanged(upstream, "a", "up"))
    recent.forget("one")

    assert [None, 5.0] == [recent.of(upstream, "a").since_s for upstream in ("one", "two")]
    assert 2 == len(recent.changes())
