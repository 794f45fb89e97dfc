"""Time of a body: slow ones are late at any time, and after the time in all only fast ones go on."""

import pytest

from gateway.api.server.http_protocol import BodyPace


class Loop:
    """Event loop of which only the clock is used."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def outcome(bytes_per_s: float, seconds: float) -> float | None:
    """Return when a body at this rate is late, None if it is not within this time."""
    loop = Loop()
    pace = BodyPace(loop)  # type: ignore[arg-type]
    pace.start(60)
    came = 0
    while loop.now_s < seconds:
        step_s = pace.next_check_s()
        assert step_s > 0
        loop.now_s += step_s
        came += round(bytes_per_s * step_s)
        if pace.is_late(came, was_paused=False):
            return loop.now_s
    return None


@pytest.mark.parametrize(
    ("bytes_per_s", "late_at_s"), [(1000, 5.0), (500_000, 60.0), (2_000_000, None), (100_000_000, None)]
)
def test_only_a_fast_body_outlasts_its_time(bytes_per_s: float, late_at_s: float | None) -> None:
    assert outcome(bytes_per_s, 600) == late_at_s


def test_a_body_that_becomes_slow_after_its_time_is_late() -> None:
    loop = Loop()
    pace = BodyPace(loop)  # type: ignore[arg-type]
    pace.start(60)
    loop.now_s = 70.0
    pace.next_check_s()
    assert not pace.is_late(10**9, was_paused=False)
    loop.now_s += pace.next_check_s()
    assert pace.is_late(10**9, was_paused=False)
