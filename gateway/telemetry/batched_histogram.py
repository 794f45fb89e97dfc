"""Histogram that records many observations in one call.

prometheus-client takes a lock and walks the buckets for each observation, ten times per call.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import Histogram


class BatchedHistogram(Histogram):
    """Histogram with `observe_many`."""

    def observe_many(self, amounts: Sequence[float]) -> None:
        """Observe each amount; none may be NaN."""
        self._sum.inc(sum(amounts))
        places = Tally(bisect_left(self._upper_bounds, amount) for amount in amounts)
        for place, count in places.items():
            self._buckets[place].inc(count)
