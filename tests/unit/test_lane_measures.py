"""Measurements of a lane: batch size, latencies of attempts, and the budget of added attempts."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lane.measures import MAX_TOKENS, SAMPLES_MAX, SAMPLES_MIN, START_TOKENS, BatchSizer, Latencies
from gateway.lane.retries import FREE_ATTEMPTS, RetryBudget


@pytest.mark.parametrize("jitter", [0, 0.3])
@pytest.mark.parametrize(
    ("fixed_s", "token_s", "expected"),
    [
        (0.0, 1 / 20_000, 5_000),
        (0.01, 1 / 200_000, 48_000),
        (0.02, 1 / 2_000, 460),
        # A batch that exceeds the target at any size must not shrink further and further.
        (1.0, 1 / 5_000, 5_000),
        (0.3, 0.0, MAX_TOKENS),
    ],
)
def test_batch_size_fits_the_target_or_the_fixed_cost(
    fixed_s: float, token_s: float, expected: int, jitter: float
) -> None:
    random, sizer, sizes = Random(1), BatchSizer(), []
    for _ in range(600):
        full = random.random() < 0.7
        tokens = int(sizer.tokens * random.uniform(0.9, 1)) if full else random.randint(5, 200)
        sizer.record_batch(tokens, (fixed_s + token_s * tokens) * (1 + jitter * random.uniform(-1.7, 1.7)))
        sizes.append(sizer.tokens)
    late = sizes[300:]

    assert expected * 0.75 <= sum(late) / len(late) <= expected * 1.3
    assert max(late) <= expected * 2.5


def test_small_batches_do_not_change_the_batch_size() -> None:
    sizer = BatchSizer()
    for _ in range(1000):
        sizer.record_batch(10, 0.02)

    assert sizer.tokens == START_TOKENS


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1), st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=200))
def test_added_attempts_stay_within_their_share(share: float, steps: list[tuple[bool, float]]) -> None:
    now_s = first = extra = 0.0
    budget = RetryBudget(share, now_s)
    for is_first, pause_s in steps:
        faded = 0.5 ** (pause_s / 10)
        now_s += pause_s
        first, extra = first * faded, extra * faded
        if is_first:
            budget.add_first_attempt(now_s)
            first += 1
        elif budget.try_spend(now_s):
            extra += 1
        assert extra <= first * share + FREE_ATTEMPTS + 1e-6


def test_quiet_lane_may_retry_and_its_budget_recovers() -> None:
    budget = RetryBudget(0.2, 0.0)
    allowed = sum(budget.try_spend(0.0) for _ in range(100))

    assert allowed == FREE_ATTEMPTS
    assert budget.try_spend(60.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), max_size=3 * SAMPLES_MAX))
def test_quantile_is_of_recent_samples_and_unknown_for_few(durations: list[float]) -> None:
    latencies = Latencies()
    for duration_s in durations:
        latencies.add(duration_s)
    late_s = latencies.quantile(0.95)
    last = sorted(durations[-SAMPLES_MAX:])

    if len(last) < SAMPLES_MIN:
        assert late_s is None
    else:
        assert late_s == last[int(0.95 * len(last))]
        assert sum(duration_s > late_s for duration_s in last) <= len(last) * 0.05
