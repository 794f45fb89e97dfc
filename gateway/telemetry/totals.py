"""Totals over all workers, read back from the metrics for a status snapshot.

Metrics already add up the counts of all workers, so a snapshot of them agrees with every dashboard.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import Metric

from gateway.telemetry.snapshot import CallsStatus, Durations, TenantStatus

# Requests of monitoring are not counted among the calls that it monitors.
MONITORING = ("/admin/", "/usage/calls", "/ui", "/metrics", "/livez", "/readyz", "/health", "/ping")

Labels = Mapping[str, str]


class Totals:
    """Samples of the metrics, by name."""

    def __init__(self, collected: Iterable[Metric]) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in collected:
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def number(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels, 0 if there are none."""
        return sum(value for _, value in self._of(name, labels))

    def greatest(self, name: str, **labels: str) -> float:
        """Return the greatest sample with these labels, 0 if there are none."""
        return max((value for _, value in self._of(name, labels)), default=0.0)

    def calls(self) -> CallsStatus:
        """Return the calls, without those of monitoring."""
        outcomes: dict[str, int] = defaultdict(int)
        for labels, value in self._samples["gateway_calls_total"]:
            if not is_monitoring(labels.get("route", "")):
                outcomes[labels["outcome"]] += int(value)
        return CallsStatus(
            dict(outcomes),
            self.durations("gateway_call_duration_seconds"),
            self.durations("gateway_bulk_duration_seconds"),
        )

    def durations(self, name: str, **labels: str) -> Durations:
        """Return the sum of a histogram's series, without those of monitoring."""
        counts: dict[float, float] = defaultdict(float)
        for sample_labels, value in self._of(f"{name}_bucket", labels):
            if not is_monitoring(sample_labels.get("route", "")):
                counts[float(sample_labels["le"])] += value
        bounds = tuple(sorted(counts))
        sum_s = sum(
            value
            for sample_labels, value in self._of(f"{name}_sum", labels)
            if not is_monitoring(sample_labels.get("route", ""))
        )
        return Durations(bounds[:-1], tuple(counts[bound] for bound in bounds), sum_s)

    def tenants(self) -> tuple[TenantStatus, ...]:
        """Return every tenant that has called, sorted by name."""
        calls = self._by_tenant("gateway_tenant_calls_total")
        inputs = self._by_tenant("gateway_inputs_total")
        tokens = self._by_tenant("gateway_tokens_total")
        refused = self._by_tenant("gateway_quota_decisions_total", decision="refused")
        names = calls.keys() | self._by_tenant("gateway_quota_decisions_total").keys()
        return tuple(
            TenantStatus(name, int(calls[name]), int(inputs[name]), int(tokens[name]), int(refused[name]))
            for name in sorted(names)
        )

    def _by_tenant(self, name: str, **labels: str) -> defaultdict[str, float]:
        """Return the sum of the samples of each tenant: one look at each sample, as there may be many."""
        sums: defaultdict[str, float] = defaultdict(float)
        for sample_labels, value in self._of(name, labels):
            sums[sample_labels["tenant"]] += value
        return sums

    def _of(self, name: str, labels: Labels) -> list[tuple[Labels, float]]:
        return [
            (sample_labels, value)
            for sample_labels, value in self._samples[name]
            if labels.items() <= sample_labels.items()
        ]


def is_monitoring(route: str) -> bool:
    """Return whether a route is one of monitoring, or of the console."""
    return route.startswith(MONITORING)
