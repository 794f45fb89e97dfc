"""Breaker of an upstream that responds and fails its work."""

from gateway.routing.split import FAILURES_MAX, PAUSE_MAX_S, PAUSE_MIN_S, Breaker


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
