"""Bounds learned from a replica's refusals, and pauses after them."""

from gateway.routing.replica import (
    LEARNED_FOR_S,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    PAUSES_MAX,
    REFUSED_BYTES_MIN,
    Refusals,
)


def test_bound_is_half_of_the_smallest_refused_request() -> None:
    refusals = Refusals()

    assert refusals.learn_size(800_000, 0)
    assert refusals.learn_size(600_000, 1)
    assert not refusals.learn_size(700_000, 2)
    assert 300_000 == refusals.learned_bytes


def test_refusal_of_a_small_request_shows_no_bound() -> None:
    refusals = Refusals()

    assert not refusals.learn_size(REFUSED_BYTES_MIN - 1, 0)
    assert refusals.learned_bytes is None


def test_bound_is_forgotten_after_a_while() -> None:
    refusals = Refusals()
    refusals.learn_size(800_000, 10)

    refusals.forget_old_size(10 + LEARNED_FOR_S - 1)
    assert 400_000 == refusals.learned_bytes
    refusals.forget_old_size(10 + LEARNED_FOR_S)
    assert refusals.learned_bytes is None


def test_pauses_double_until_a_batch_is_computed() -> None:
    refusals, pauses = Refusals(), []
    for _ in range(PAUSES_MAX + 2):
        pauses.append(refusals.pause(1))
        assert refusals.pause(1) is None
        refusals.resume()

    assert [PAUSE_MIN_S, PAUSE_MIN_S * 2, PAUSE_MIN_S * 4] == pauses[:3]
    assert [PAUSE_MAX_S, PAUSE_MAX_S] == pauses[-2:]
    refusals.end_pauses()
    assert PAUSE_MIN_S / 2 == refusals.pause(0)
