"""Choice between the upstreams of one model, and the breaker of each."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.split import (
    FAILURES_MAX,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    SECOND_STEP,
    Breaker,
    Health,
    Member,
    Split,
    Trial,
    by_health,
    next_point,
    preference,
)

CALLS = 1_000_000
TENANTS = 20_000


@pytest.mark.slow
def test_a_million_calls_follow_the_weights_within_half_a_percent() -> None:
    split = Split((Member("a", 70), Member("b", 25), Member("c", 5), Member("spare", 9, priority=1)))
    trial = Trial("trial", 0.01)
    expected = {"trial": 0.01, "a": 0.99 * 0.7, "b": 0.99 * 0.25, "c": 0.99 * 0.05}
    first: Counter[str] = Counter()
    while_a_is_out: Counter[str] = Counter()
    point = 0.123
    for _ in range(CALLS):
        point = next_point(point)
        order = preference(split, trial, "any", point)
        first[order[0]] += 1
        while_a_is_out[next(name for name in order if name != "a")] += 1

    assert expected.keys() == first.keys()
    for name, share in expected.items():
        assert abs(first[name] / (share * CALLS) - 1) < 0.005, (name, first)
    # Those that are left take over by their own weights.
    assert abs(while_a_is_out["b"] / while_a_is_out["c"] / 5 - 1) < 0.005


def test_any_run_of_calls_is_close_to_the_weights_even_for_callers_that_alternate() -> None:
    split = Split((Member("a"), Member("b")))
    point, large = 0.9, Counter[str]()
    for number in range(200):
        point = next_point(point)
        if number % 2:
            large[preference(split, None, "", point)[0]] += 1

    assert abs(large["a"] - large["b"]) <= 6


def test_two_sequences_are_independent() -> None:
    first = second = 0.1
    both = 0
    for _ in range(20_000):
        first, second = next_point(first), next_point(second, SECOND_STEP)
        both += first < 0.5 and second < 0.5

    assert abs(both / 20_000 - 0.25) < 0.01


def of_tenants(*members: Member, trial: Trial | None = None) -> dict[str, str]:
    split = Split(members, by_tenant=True)
    return {f"t{n}": preference(split, trial, f"t{n}", n / TENANTS)[0] for n in range(TENANTS)}


def test_tenants_are_divided_by_weight_and_stay() -> None:
    members = Member("a", 3), Member("b", 1)
    found = of_tenants(*members)

    assert found == of_tenants(*reversed(members))
    assert abs(Counter(found.values())["a"] / TENANTS - 0.75) < 0.02


def test_an_upstream_that_is_added_moves_only_its_own_share_of_tenants() -> None:
    before = of_tenants(Member("a", 2), Member("b", 1))
    after = of_tenants(Member("a", 2), Member("b", 1), Member("new", 1))
    moved = {tenant for tenant in before if before[tenant] != after[tenant]}

    assert {"new"} == {after[tenant] for tenant in moved}
    assert abs(len(moved) / TENANTS - 0.25) < 0.02


def test_a_trial_by_tenant_takes_whole_tenants() -> None:
    found = of_tenants(Member("a"), trial=Trial("trial", 0.1))

    assert abs(Counter(found.values())["trial"] / TENANTS - 0.1) < 0.01


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 3)), min_size=1, max_size=6),
    st.floats(0, 1, exclude_max=True),
    st.booleans(),
    st.floats(0, 1),
)
def test_an_order_has_each_upstream_once_and_by_priority(
    weights: list[tuple[int, int]], point: float, by_tenant: bool, share: float
) -> None:
    members = tuple(Member(f"m{i}", weight, priority) for i, (weight, priority) in enumerate(weights))
    order = preference(Split(members, by_tenant=by_tenant), Trial("trial", share), "tenant", point)
    names = [name for name in order if name != "trial"]

    assert sorted(member.name for member in members) == sorted(names)
    priority_of = {member.name: member.priority for member in members}
    assert sorted(priority_of[name] for name in names) == [priority_of[name] for name in names]
    assert "trial" not in order[1:]


def test_ready_upstreams_come_before_those_that_are_expected() -> None:
    states: dict[str, Health] = {"a": "expected", "b": "out", "c": "ready", "d": "ready"}

    assert ["c", "d", "a"] == by_health("abcd", states.__getitem__)


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        assert breaker.admits(0.0)
        breaker.record_failure(0.0)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.record_failure(0.0)
        breaker.record_success()

    assert breaker.admits(0.0)
    assert not opened().admits(0.0)


def test_admits_one_call_per_pause_until_one_succeeds() -> None:
    breaker = opened()

    assert [False, True, False] == [breaker.admits(s) for s in (0.1, PAUSE_MIN_S, PAUSE_MIN_S)]
    breaker.record_success()
    assert breaker.admits(PAUSE_MIN_S)


def test_late_failures_do_not_prolong_the_pause_but_failed_trials_do() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.record_failure(0.1)
    assert breaker.admits(PAUSE_MIN_S)

    now_s = PAUSE_MIN_S
    for doubled in range(1, 10):
        breaker.record_failure(now_s)
        pause_s = min(PAUSE_MIN_S * 2**doubled, PAUSE_MAX_S)
        assert [False, True] == [breaker.admits(now_s + pause_s - 0.01), breaker.admits(now_s + pause_s)]
        now_s += pause_s
