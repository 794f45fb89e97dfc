"""How long attempts of a lane have taken lately, and which time few of them exceed. Pure."""

from bisect import bisect_left, insort
from collections import deque

KEPT = 200
# Fewer tell nothing of the slowest of twenty.
ENOUGH = 40


class Latencies:
    """The last durations, in order of arrival and sorted."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, duration_s: float) -> None:
        """Note one; the oldest is forgotten."""
        self._arrived.append(duration_s)
        insort(self._sorted, duration_s)
        if len(self._arrived) > KEPT:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]

    def quantile(self, share: float) -> float | None:
        """The duration that this share of them did not exceed; None while too few are known."""
        if len(self._sorted) < ENOUGH:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]
