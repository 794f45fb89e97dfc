"""Creation of the gateway's metrics in one registry, and a cache of their children by labels.

prometheus-client takes a lock and walks the buckets for each observation, ten times per call:
`BatchedHistogram` records many observations at once.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import time
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Exemplar


class BatchedHistogram(Histogram):
    """Histogram that observes many amounts at once."""

    def observe_many(self, amounts: Sequence[float]) -> None:
        """Observe each amount; none may be NaN."""
        observe_in_each((self,), amounts)

    def add_sorted(self, total: float, buckets: Mapping[int, int]) -> None:
        """Add amounts that were sorted into the buckets. total: their sum."""
        self._sum.inc(total)
        for number, count in buckets.items():
            self._buckets[number].inc(count)

    def link(self, traced: Sequence[tuple[float, str]]) -> None:
        """Link buckets to traces. traced: observed amounts, each with its trace; the last counts."""
        bucket_of, now_s = self.bucket_of(), time()
        latest = {bucket_of(amount): (amount, trace_id) for amount, trace_id in traced}
        for number, (amount, trace_id) in latest.items():
            self._buckets[number].set_exemplar(Exemplar({"trace_id": trace_id}, amount, now_s))

    def bucket_of(self) -> Callable[[float], int]:
        """Return the function from an amount to the number of its bucket."""
        return partial(bisect_left, self._upper_bounds)


def observe_in_each(histograms: Sequence[BatchedHistogram], amounts: Sequence[float]) -> None:
    """Observe each amount in several histograms of the same buckets; none may be NaN."""
    total, buckets = sum(amounts), Tally(map(histograms[0].bucket_of(), amounts))
    for histogram in histograms:
        histogram.add_sorted(total, buckets)


# From a call that touches nothing to a bulk call at its deadline, in steps of about 2.5.
DURATION_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Key = TypeVar("Key")
Child = TypeVar("Child")
# How the gauges of several workers become one.
MultiprocessMode = Literal["livesum", "livemax", "livemin"]


class Children(dict[Key, Child], Generic[Key, Child]):
    """Cache of one metric's children by the labels of events.

    The library's own lookup takes longer than incrementing the child.
    """

    def __init__(self, create: Callable[[Key], Child]) -> None:
        super().__init__()
        self._create = create

    def __missing__(self, key: Key) -> Child:
        """Create the child at its first use."""
        child = self[key] = self._create(key)
        return child


class LiveGauges:
    """Gauges with the same labels, of things that come and go.

    removes_series: the series of what is gone are deleted. Several workers write to files, from which no
    series can be deleted; there they are set to 0. shown: labels of the present things.
    """

    def __init__(self, gauges: Sequence[Gauge], *, removes_series: bool) -> None:
        self._gauges = gauges
        self._removes_series = removes_series
        self.shown: set[tuple[str, ...]] = set()

    def show(self, labels: tuple[str, ...], *values: float) -> None:
        """Set the gauges of one thing."""
        self.shown.add(labels)
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.labels(*labels).set(value)

    def keep_only(self, labels: Iterable[tuple[str, ...]]) -> None:
        """Drop the gauges of all other things."""
        missing = self.shown.difference(labels)
        for gone in missing:
            for gauge in self._gauges:
                gauge.labels(*gone).set(0)
                if self._removes_series:
                    gauge.remove(*gone)
        self.shown -= missing


class MetricFactory:
    """Creates metrics with the prefix `gateway_` in one registry. removes_series: as of `LiveGauges`."""

    def __init__(self, registry: CollectorRegistry, *, removes_series: bool) -> None:
        self._registry = registry
        self.removes_series = removes_series

    def counter(self, name: str, documentation: str, labels: Sequence[str]) -> Counter:
        """Create a counter; the exposition adds `_total` to its name."""
        return Counter(f"gateway_{name}", documentation, labels, registry=self._registry)

    def gauge(self, name: str, documentation: str, labels: Sequence[str], mode: MultiprocessMode) -> Gauge:
        """Create a gauge. mode: how the values of several workers are combined."""
        return Gauge(
            f"gateway_{name}", documentation, labels, multiprocess_mode=mode, registry=self._registry
        )

    def live(self, *gauges: Gauge) -> LiveGauges:
        """Return gauges of things that come and go."""
        return LiveGauges(gauges, removes_series=self.removes_series)

    def seconds(
        self, name: str, documentation: str, *labels: str, buckets: Sequence[float] = DURATION_BUCKETS_S
    ) -> BatchedHistogram:
        """Create a histogram of durations; `_seconds` is added to its name."""
        return BatchedHistogram(
            f"gateway_{name}_seconds", documentation, labels, buckets=buckets, registry=self._registry
        )

    def cosines(
        self, name: str, documentation: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        """Create a histogram of cosines."""
        return Histogram(f"gateway_{name}", documentation, labels, buckets=buckets, registry=self._registry)

    def sizes(self, name: str, documentation: str) -> BatchedHistogram:
        """Create a histogram of sizes per upstream."""
        return BatchedHistogram(
            f"gateway_{name}", documentation, ["upstream"], buckets=SIZE_BUCKETS, registry=self._registry
        )
