"""Measurements of a lane: drain rate, batch size, latencies, and the budget of added attempts."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lane.measures import (
    MAX_TOKENS,
    RETRY_AFTER_MAX_S,
    SAMPLES_MAX,
    SAMPLES_MIN,
    START_TOKENS,
    BatchSizer,
    DrainRate,
    Latencies,
)
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


many = settings(max_examples=200, deadline=None)


def steady(tokens: int, every_s: float, seconds: float, start_s: float = 0.0) -> tuple[DrainRate, float]:
    """Return a rate after completing tokens at the end of every interval, and the current time."""
    rate = DrainRate(start_s)
    now_s = start_s
    while now_s < start_s + seconds:
        now_s += every_s
        rate.add(tokens, now_s)
    return rate, now_s


def test_wait_is_one_second_before_anything_has_completed() -> None:
    assert 1 == DrainRate(0.0).retry_after_s(10**6, 0.0)
    assert 1 == DrainRate(0.0).retry_after_s(10**6, 5.0)


@pytest.mark.parametrize("seconds", [1, 5, 60, 600])
@pytest.mark.parametrize("every_s", [0.01, 0.125, 1.0])
def test_wait_at_a_steady_rate_is_queued_tokens_over_rate(every_s: float, seconds: float) -> None:
    rate, now_s = steady(int(1000 * every_s), every_s, seconds)

    assert 9 <= rate.retry_after_s(10_000, now_s) <= 11


@pytest.mark.parametrize(("queued", "expected"), [(0, 1), (1, 1), (900, 1), (2500, 3), (10**7, 60)])
def test_wait_is_whole_seconds_from_one_to_sixty(queued: int, expected: int) -> None:
    rate, now_s = steady(1000, 1.0, 1.0)

    assert expected == rate.retry_after_s(queued, now_s)


HISTORIES = st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 10**6)), max_size=20)


@many
@given(HISTORIES, st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e5))
def test_longer_queue_never_means_a_shorter_wait(
    history: list[tuple[float, int]], queued_a: int, queued_b: int, pause_s: float
) -> None:
    rate, now_s = DrainRate(0.0), 0.0
    for step_s, tokens in history:
        now_s += step_s
        rate.add(tokens, now_s)
    now_s += pause_s
    shorter, longer = (rate.retry_after_s(queued, now_s) for queued in sorted((queued_a, queued_b)))

    assert 1 <= shorter <= longer <= RETRY_AFTER_MAX_S


@pytest.mark.parametrize("idle_s", [1e3, 9e3, 1.01e4, 1.05e4, 1.07e4, 1.1e4, 1e6])
def test_wait_is_finite_after_any_idle_time(idle_s: float) -> None:
    rate = DrainRate(0.0)
    rate.add(1, 1.0)

    assert rate.retry_after_s(10**6, 1.0 + idle_s) in range(1, RETRY_AFTER_MAX_S + 1)


def test_reading_the_rate_does_not_change_it() -> None:
    read, now_s = steady(500, 0.5, 20)
    unread, _ = steady(500, 0.5, 20)
    for tenth in range(50):
        read.retry_after_s(10, now_s + tenth / 10)

    assert unread.retry_after_s(5000, now_s + 5) == read.retry_after_s(5000, now_s + 5)


@pytest.mark.parametrize(
    ("before", "idle_s", "after", "least", "most"),
    [
        (100, 0, 1000, 10, 12),
        (1000, 0, 100, 45, 60),
        (1000, 60, 1000, 9, 12),
        (1000, 3600, 1000, 9, 12),
        (1000, 86_400, 1000, 9, 12),
    ],
)
def test_rate_follows_a_change_or_idle_time_within_a_minute(
    before: int, idle_s: float, after: int, least: int, most: int
) -> None:
    rate, now_s = steady(before, 1.0, 60 if idle_s else 120)
    now_s += idle_s
    for _ in range(60):
        now_s += 1
        rate.add(after, now_s)

    assert least <= rate.retry_after_s(10_000, now_s) <= most
