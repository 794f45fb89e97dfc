"""Durations of recent attempts, and their quantiles. Pure."""

from bisect import bisect_left, insort
from collections import deque

SAMPLES_MAX = 200
# With fewer samples the slowest of twenty is not known.
SAMPLES_MIN = 40


class Latencies:
    """Most recent durations, kept in order of arrival and sorted."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, duration_s: float) -> None:
        """Record a duration and drop the oldest one past `SAMPLES_MAX`."""
        self._arrived.append(duration_s)
        insort(self._sorted, duration_s)
        if len(self._arrived) > SAMPLES_MAX:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]

    def quantile(self, share: float) -> float | None:
        """Return the duration that `share` of the samples do not exceed, or None with too few samples."""
        if len(self._sorted) < SAMPLES_MIN:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]
