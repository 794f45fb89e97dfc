"""What engines count, as TEI's metrics: the same names, so that its dashboards and scalers work here too.

`te_queue_size` is what waits for the engine, wherever it waits: the gateway's lane holds nearly all of it, so
that the engine's own queue alone would tell a scaler nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from backends.torch.stats import BOUNDS, COUNTERS, Distribution, Stats

LABEL = "upstream"


def families(stats: Mapping[str, Stats], waiting: Mapping[str, float]) -> Iterator[Metric]:
    """Every metric of every engine that answered. waiting: inputs in each upstream's lane."""
    if not stats:
        return
    size = GaugeMetricFamily("te_queue_size", "Inputs that wait for the engine.", labels=[LABEL])
    for name, one in stats.items():
        size.add_metric([name], one.queue_size + waiting.get(name, 0.0))
    yield size
    for name, label in COUNTERS.items():
        yield _counter(name, label, stats)
    for name in BOUNDS:
        yield _histogram(name, stats)


def waiting_inputs(shown: Iterable[Metric]) -> dict[str, float]:
    """Inputs in each upstream's lane, of all workers together."""
    return {
        sample.labels[LABEL]: sample.value
        for family in shown
        if family.name == "gateway_lane_queued_inputs"
        for sample in family.samples
    }


def _counter(name: str, label: str, stats: Mapping[str, Stats]) -> Metric:
    # Of no type: the format's counters end in _total, and TEI's do not.
    family = Metric(name, "TEI's counter of that name.", "untyped")
    for upstream, one in stats.items():
        counted = one.counters[name] if label else {"": one.counters[name].get("", 0)}
        for value, number in counted.items():
            family.add_sample(name, {LABEL: upstream} | ({label: value} if label else {}), number)
    return family


def _histogram(name: str, stats: Mapping[str, Stats]) -> Metric:
    family = HistogramMetricFamily(name, "TEI's histogram of that name.", labels=[LABEL])
    for upstream, one in stats.items():
        distribution = one.distributions[name]
        family.add_metric([upstream], _buckets(name, distribution), distribution.total)
    return family


def _buckets(name: str, distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:.6g}" for bound in BOUNDS[name]] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))
