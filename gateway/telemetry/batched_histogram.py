"""Counting many observations of a histogram in one go.

prometheus-client takes a lock and walks the buckets for each observation: ten times on every call's path.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import Histogram


class ManyHistogram(Histogram):
    """A histogram that is told of several observations at once."""

    def observe_many(self, amounts: Sequence[float]) -> None:
        """As `observe` for each of them; none is NaN."""
        self._sum.inc(sum(amounts))
        for place, count in Tally(bisect_left(self._upper_bounds, one) for one in amounts).items():
            self._buckets[place].inc(count)
