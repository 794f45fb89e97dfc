"""Breaker of one upstream among several: calls avoid one that responds and fails all its work. Pure.

Pools do not eject their last replica for failures, because the callers' inputs may cause them. Where another
upstream serves the same model, calls need not find out one by one: after failures in a row the upstream is
the last choice, and single calls try it from time to time.
"""

# Failures in a row, without a success between them, that open the breaker.
FAILURES_MAX = 3
PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 30.0


class Breaker:
    """Breaker of one upstream; open, its upstream is the last choice. Times are in seconds on one clock."""

    __slots__ = ("_failures", "_is_tried", "_open_until_s", "_pause_s")

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = 0.0
        self._pause_s = PAUSE_MIN_S
        # Whether a call was let through since it opened.
        self._is_tried = False

    def admits(self, now_s: float) -> bool:
        """Return whether a call may choose the upstream; open, one call per pause may."""
        if self._failures < FAILURES_MAX:
            return True
        if now_s < self._open_until_s:
            return False
        self._open_until_s, self._is_tried = now_s + self._pause_s, True
        return True

    def record_success(self) -> None:
        """Close the breaker: the upstream has computed a call."""
        self._failures, self._pause_s, self._is_tried = 0, PAUSE_MIN_S, False

    def record_failure(self, now_s: float) -> None:
        """Count a failure. The pause doubles with each one that a call on trial meets."""
        self._failures += 1
        if self._failures == FAILURES_MAX or self._is_tried:
            # Other calls that were on their way when it opened change nothing.
            self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S) if self._is_tried else PAUSE_MIN_S
            self._open_until_s, self._is_tried = now_s + self._pause_s, False
