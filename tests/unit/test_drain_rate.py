"""Drain rate of a lane, and the `retry-after` computed from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lane.measures import RETRY_AFTER_MAX_S, DrainRate

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


@pytest.mark.parametrize(("before", "after", "least", "most"), [(100, 1000, 10, 12), (1000, 100, 45, 60)])
def test_rate_follows_a_change_within_a_minute(before: int, after: int, least: int, most: int) -> None:
    rate, now_s = steady(before, 1.0, 120)
    for _ in range(60):
        now_s += 1
        rate.add(after, now_s)

    assert least <= rate.retry_after_s(10_000, now_s) <= most


@pytest.mark.parametrize("idle_s", [60, 3600, 86_400])
def test_rate_recovers_from_idle_time_within_a_minute(idle_s: float) -> None:
    rate, now_s = steady(1000, 1.0, 60)
    now_s += idle_s
    for _ in range(60):
        now_s += 1
        rate.add(1000, now_s)

    assert 9 <= rate.retry_after_s(10_000, now_s) <= 12
