"""Ranking of replicas by load balancing policy."""

from collections import Counter
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.choice import Policy, rank_replicas

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
