"""Choice between replicas: the order by policy, and the weight by speed."""

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import Capabilities, Operation
from gateway.routing.choice import (
    SAMPLES_MIN,
    TRIAL_EVERY,
    BatchTimes,
    Pace,
    Policy,
    rank_replicas,
    slowdowns,
)
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import BatchLoad, Replica
from gateway.routing.window import Window
from tests.fakes.replicas import HeldReplica

POLICIES: tuple[Policy, ...] = get_args(Policy)
LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=8)

many = settings(max_examples=200, deadline=None)


@many
@given(st.sampled_from(POLICIES), LOADS, st.integers(0, 10**6), st.integers())
def test_every_policy_ranks_every_replica_once(
    policy: Policy, loads: list[int], turn: int, seed: int
) -> None:
    assert list(range(len(loads))) == sorted(rank_replicas(policy, loads, turn, Random(seed)))


@pytest.mark.parametrize("policy", POLICIES)
def test_ranking_of_no_replicas_is_empty(policy: Policy) -> None:
    assert [] == rank_replicas(policy, [], 3, Random(0))


@pytest.mark.parametrize("policy", ["round_robin", "least_tokens"])
def test_equal_replicas_take_turns(policy: Policy) -> None:
    firsts = [rank_replicas(policy, [7, 7, 7], turn, Random(0))[0] for turn in range(6)]

    assert [0, 1, 2, 0, 1, 2] == firsts


def test_round_robin_ignores_loads() -> None:
    assert [1, 2, 0] == rank_replicas("round_robin", [0, 99, 5], 1, Random(0))


@many
@given(LOADS, st.integers(0, 100))
def test_least_tokens_ranks_by_load(loads: list[int], turn: int) -> None:
    order = rank_replicas("least_tokens", loads, turn, Random(0))

    assert sorted(loads) == [loads[index] for index in order]


@many
@given(LOADS, st.integers())
def test_two_choices_ranks_the_better_of_two_first(loads: list[int], seed: int) -> None:
    order = rank_replicas("two_choices", loads, 0, Random(seed))

    assert loads[order[0]] <= loads[order[min(1, len(order) - 1)]]


def test_two_choices_spreads_load_and_avoids_the_busiest() -> None:
    random = Random(1)
    equal = Counter(rank_replicas("two_choices", [1, 1, 1, 1], 0, random)[0] for _ in range(2000))
    uneven = Counter(rank_replicas("two_choices", [9, 1, 1, 1], 0, random)[0] for _ in range(2000))

    assert all(400 < count < 600 for count in equal.values())
    assert 0 == uneven[0]


TOKENS = 20


def simulate(
    policy: Policy,
    times_s: Callable[[int, float], float],
    *,
    calls: int = 4000,
    callers: int = 8,
    window: int = 4,
    tokens: Callable[[int], int] = lambda _: TOKENS,
) -> list[int]:
    """Return the replica of each call of callers that call one after the other.

    times_s: returns the time that a batch takes at a replica, by its index and the moment.
    """
    replicas = [Replica(str(index), HeldReplica(), Window(window)) for index in range(2)]
    pool = Pool("up", replicas, policy, lambda _: None, seed=0)
    for replica in replicas:
        pool.transition(replica, ReplicaEvent.JOINED, "", Capabilities("m", frozenset({Operation.EMBED})))
    chosen: list[int] = []
    ends: list[tuple[float, int, Replica, BatchLoad, float]] = []
    numbers, now_s, waiting = count(), 0.0, callers
    while len(chosen) < calls:
        while waiting and (replica := pool.pick(1, ())) is not None:
            size = tokens(len(chosen))
            load = BatchLoad(1, size, ("acme",), tokens_before=replica.tokens)
            replica.add_batch(load, now_s)
            index = replicas.index(replica)
            heapq.heappush(ends, (now_s + times_s(index, now_s), next(numbers), replica, load, now_s))
            chosen.append(index)
            waiting -= 1
        now_s, _, replica, load, sent_s = heapq.heappop(ends)
        pool.record_success(replica, load, now_s - sent_s, now_s, was_full=True)
        replica.remove_batch(load)
        waiting += 1
    return chosen


def share_of(chosen: list[int], index: int) -> float:
    """Return a replica's share of the calls."""
    return Counter(chosen)[index] / len(chosen)


@pytest.mark.parametrize("policy", ["least_tokens", "two_choices"])
@pytest.mark.parametrize("callers", [1, 4, 16])
def test_replica_a_hundred_times_slower_than_its_twin_keeps_few_calls(policy: Policy, callers: int) -> None:
    chosen = simulate(policy, lambda index, _: (0.001, 0.1)[index], callers=callers)

    assert share_of(chosen[1000:], 1) < 0.02
    assert share_of(chosen[1000:], 1) > 0


@pytest.mark.parametrize("policy", ["least_tokens", "two_choices"])
def test_replica_that_recovers_gets_its_share_again(policy: Policy) -> None:
    chosen = simulate(policy, lambda index, now_s: 0.1 if index and now_s < 1 else 0.001, calls=20_000)

    assert share_of(chosen[500:1500], 1) < 0.05
    assert share_of(chosen[-4000:], 1) > 0.4


@pytest.mark.parametrize("policy", ["least_tokens", "two_choices"])
def test_replicas_that_differ_little_share_the_calls_as_before(policy: Policy) -> None:
    chosen = simulate(policy, lambda index, _: (0.001, 0.002)[index])

    assert share_of(chosen, 1) > 0.3


def test_small_and_large_batches_do_not_make_a_replica_look_slow() -> None:
    sizes = (10, 16_000)
    chosen = simulate(
        "least_tokens", lambda _index, _now_s: 0.001, tokens=lambda number: sizes[number // 50 % 2]
    )

    assert 0.4 < share_of(chosen, 1) < 0.6


def test_slow_replica_takes_the_calls_if_it_is_alone_or_its_twin_is_held() -> None:
    replicas = [Replica(str(index), HeldReplica(), Window(4)) for index in range(2)]
    pool = Pool("up", replicas, "least_tokens", lambda _: None, seed=0)
    for replica, took_s in zip(replicas, (0.001, 0.1), strict=True):
        pool.transition(replica, ReplicaEvent.JOINED, "", Capabilities("m", frozenset({Operation.EMBED})))
        for _ in range(2 * SAMPLES_MIN):
            pool.record_success(replica, BatchLoad(1, TOKENS, ("acme",)), took_s, 0.0, was_full=False)
    fast, slow = replicas

    assert fast is pool.pick(1, ())
    assert slow is pool.pick(1, [fast])
    fast.hold(10.0)
    assert slow is pool.pick(1, ())


def test_replica_without_a_record_counts_as_equal() -> None:
    fast, unknown = Pace(), Pace()
    for _ in range(SAMPLES_MIN):
        fast.add(1.0)
    unknown.add(100.0)

    assert slowdowns([fast, unknown]) is None
    assert slowdowns([]) is None


def test_times_are_those_of_the_fastest_replica_by_size() -> None:
    times = BatchTimes()
    for _ in range(20):
        times.slowness(1.0, 16_000)
        times.slowness(0.01, 10)

    assert 1.0 == pytest.approx(times.slowness(0.01, 12))
    assert 100.0 == pytest.approx(times.slowness(1.0, 12))
    assert TRIAL_EVERY > 50
