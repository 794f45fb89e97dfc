"""Statistics of engines as TEI's metrics: with the same names, TEI's dashboards and autoscalers work here.

`te_queue_size` counts the inputs in the gateway's lane too. It contains nearly all of them: the engine's own
queue would look idle to an autoscaler.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from backends.torch.stats import BOUNDS, COUNTERS, Distribution, EngineStats

LABEL = "upstream"


def families(stats: Mapping[str, EngineStats], waiting: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the metrics of all engines that answered. waiting: inputs in each upstream's lane."""
    if not stats:
        return
    size = GaugeMetricFamily("te_queue_size", "Queued inputs of the engine.", labels=[LABEL])
    for name, engine in stats.items():
        size.add_metric([name], engine.queue_size + waiting.get(name, 0.0))
    yield size
    for name, label in COUNTERS.items():
        yield _counter(name, label, stats)
    for name in BOUNDS:
        yield _histogram(name, stats)


def waiting_inputs(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the inputs in each upstream's lane, summed over all workers."""
    return {
        sample.labels[LABEL]: sample.value
        for family in metrics
        if family.name == "gateway_lane_queued_inputs"
        for sample in family.samples
    }


def _counter(name: str, label: str, stats: Mapping[str, EngineStats]) -> Metric:
    # Untyped: names of counters end in _total in this format, and TEI's do not.
    family = Metric(name, "TEI's counter of that name.", "untyped")
    for upstream, engine in stats.items():
        counts = engine.counters[name] if label else {"": engine.counters[name].get("", 0)}
        for value, number in counts.items():
            family.add_sample(name, {LABEL: upstream} | ({label: value} if label else {}), number)
    return family


def _histogram(name: str, stats: Mapping[str, EngineStats]) -> Metric:
    family = HistogramMetricFamily(name, "TEI's histogram of that name.", labels=[LABEL])
    for upstream, engine in stats.items():
        distribution = engine.distributions[name]
        family.add_metric([upstream], _buckets(name, distribution), distribution.total)
    return family


def _buckets(name: str, distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:.6g}" for bound in BOUNDS[name]] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))
