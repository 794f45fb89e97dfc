"""Bounds learned from a replica's refusals, and pauses after them."""

from gateway.routing.replica import (
    LEARNED_FOR_S,
    PAUSE_DOUBLINGS_MAX,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    REFUSED_BYTES_MIN,
    RequestLimits,
)


def test_bound_is_half_of_the_smallest_refused_request() -> None:
    limits = RequestLimits()

    assert limits.learn_size(800_000, 0)
    assert limits.learn_size(600_000, 1)
    assert not limits.learn_size(700_000, 2)
    assert 300_000 == limits.learned_bytes


def test_refusal_of_a_small_request_shows_no_bound() -> None:
    limits = RequestLimits()

    assert not limits.learn_size(REFUSED_BYTES_MIN - 1, 0)
    assert limits.learned_bytes is None


def test_bound_is_forgotten_after_a_while() -> None:
    limits = RequestLimits()
    limits.learn_size(800_000, 10)

    limits.forget_old_size(10 + LEARNED_FOR_S - 1)
    assert 400_000 == limits.learned_bytes
    limits.forget_old_size(10 + LEARNED_FOR_S)
    assert limits.learned_bytes is None


def test_pauses_double_until_a_batch_is_computed() -> None:
    limits, pauses = RequestLimits(), []
    for _ in range(PAUSE_DOUBLINGS_MAX + 2):
        pauses.append(limits.pause(1))
        assert limits.pause(1) is None
        limits.resume()

    assert [PAUSE_MIN_S, PAUSE_MIN_S * 2, PAUSE_MIN_S * 4] == pauses[:3]
    assert [PAUSE_MAX_S, PAUSE_MAX_S] == pauses[-2:]
    limits.end_pauses()
    assert PAUSE_MIN_S / 2 == limits.pause(0)
