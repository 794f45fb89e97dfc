"""Fair queue: shares by weight, the guaranteed share of bulk, and order within a tenant."""

from collections import Counter
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lane.fair_queue import BULK_EVERY, QUANTUM_TOKENS, Entry, FairQueue, Priority

FLOWS = count()
T = TypeVar("T")


def fill(queue: FairQueue[int], tenant: str, calls: int, cost: int, **options: object) -> None:
    """Queue calls of one part each."""
    for number in range(calls):
        queue.push(Entry(number, tenant, cost, next(FLOWS), **options))  # type: ignore[arg-type]


def popped(queue: FairQueue[T]) -> Entry[T]:
    """Take the next entry out of the queue."""
    entry = queue.peek()
    assert entry is not None
    queue.pop(entry)
    return entry


def tokens_after(queue: FairQueue[int], pops: int) -> Counter[str]:
    """Return the tokens of each tenant that leave in this many pops."""
    tokens: Counter[str] = Counter()
    for _ in range(pops):
        entry = popped(queue)
        tokens[entry.tenant] += entry.cost
    return tokens


@pytest.mark.parametrize(("cost_a", "cost_b"), [(100, 100), (10, 1000), (1000, 10), (5000, 300)])
def test_two_tenants_share_tokens_equally_at_any_cost_per_call(cost_a: int, cost_b: int) -> None:
    queue: FairQueue[int] = FairQueue()
    fill(queue, "a", 400_000 // cost_a, cost_a)
    fill(queue, "b", 400_000 // cost_b, cost_b)

    tokens: Counter[str] = Counter()
    while tokens.total() < 300_000:
        entry = popped(queue)
        tokens[entry.tenant] += entry.cost

    assert abs(tokens["a"] - tokens["b"]) <= 2 * (QUANTUM_TOKENS + max(cost_a, cost_b))


def test_weights_are_shares_of_tokens() -> None:
    queue: FairQueue[int] = FairQueue()
    fill(queue, "heavy", 3000, 100, weight=3)
    fill(queue, "light", 3000, 100, weight=1)

    tokens = tokens_after(queue, 2000)
    assert 2.6 <= tokens["heavy"] / tokens["light"] <= 3.4


def test_call_waits_at_most_one_turn_of_a_flooding_tenant() -> None:
    queue: FairQueue[int] = FairQueue()
    fill(queue, "flood", 10_000, 100)
    tokens_after(queue, 50)
    queue.push(Entry(0, "victim", 100, next(FLOWS)))

    before = 0
    while popped(queue).tenant != "victim":
        before += 100
    assert before <= QUANTUM_TOKENS + 100


def test_interactive_goes_first_and_bulk_keeps_its_share() -> None:
    queue: FairQueue[int] = FairQueue()
    fill(queue, "queries", 5000, 100)
    fill(queue, "reindex", 5000, 100, priority="bulk")

    tokens = tokens_after(queue, 1000)
    assert tokens["queries"] > tokens["reindex"] > 0
    assert abs(tokens["reindex"] * BULK_EVERY - tokens.total()) <= tokens.total() * 0.1


def test_small_calls_overtake_a_big_call_of_the_same_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for part in range(64):
        queue.push(Entry(f"big-{part}", "acme", 500, flow=1))
    queue.push(Entry("small", "acme", 10, flow=2))

    order = [popped(queue).item for _ in range(65)]
    assert order.index("small") <= 1
    assert [f"big-{part}" for part in range(64)] == [item for item in order if item != "small"]


def test_retried_entry_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(Entry("waiting", "acme", 10, flow=1))
    queue.push(Entry("again", "acme", 10, flow=2), first=True)

    assert ["again", "waiting"] == [popped(queue).item for _ in range(2)]


priorities: st.SearchStrategy[Priority] = st.sampled_from(("interactive", "bulk"))
entries = st.builds(
    Entry[int],
    st.integers(),
    st.sampled_from("abc"),
    st.integers(0, 20_000),
    st.integers(0, 5),
    st.integers(1, 4),
    priorities,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(entries, st.just("pop"), st.just("peek"), st.just("remove")), max_size=80))
def test_no_entry_is_lost_or_duplicated_and_sums_are_right(steps: list[Entry[int] | str]) -> None:
    queue: FairQueue[int] = FairQueue()
    inside: list[Entry[int]] = []
    for step in steps:
        match step:
            case Entry():
                queue.push(step)
                inside.append(step)
            case "pop" if inside:
                expected = queue.peek()
                assert expected is not None
                queue.pop(expected)
                inside.remove(expected)
            case "peek" if inside:
                assert queue.peek() in inside
            case "remove" if inside:
                assert queue.remove(inside.pop())
        assert (len(inside), sum(entry.cost for entry in inside)) == (len(queue), queue.tokens)
        for tenant in "abc":
            assert sum(entry.cost for entry in inside if entry.tenant == tenant) == queue.tokens_of(tenant)
    assert not queue.remove(Entry(0, "nobody", 1))
    assert queue.peek(skip="abc") is None
    assert Counter(map(repr, inside)) == Counter(repr(popped(queue)) for _ in range(len(inside)))
