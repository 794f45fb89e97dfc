"""What the exposition says of all workers together, read back for a snapshot.

Metrics already add up what workers count, so a snapshot that is read off them agrees with every dashboard.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import Metric

from gateway.telemetry.snapshot import CallsShown, Durations, TenantShown

# Whoever only watches is none of the calls that are watched.
WATCHERS = ("/admin/", "/ui", "/metrics", "/livez", "/readyz", "/health")

Labels = Mapping[str, str]


class Totals:
    """Samples by name."""

    def __init__(self, collected: Iterable[Metric]) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in collected:
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def number(self, name: str, **labels: str) -> float:
        """The sum of all samples that have these labels; 0 of none."""
        return sum(value for _, value in self._of(name, labels))

    def greatest(self, name: str, **labels: str) -> float:
        """The greatest of them; 0 of none."""
        return max((value for _, value in self._of(name, labels)), default=0.0)

    def calls(self) -> CallsShown:
        """Calls without those of watchers."""
        outcomes: dict[str, int] = defaultdict(int)
        for labels, value in self._samples["gateway_calls_total"]:
            if not labels["route"].startswith(WATCHERS):
                outcomes[labels["outcome"]] += int(value)
        return CallsShown(dict(outcomes), self.durations("gateway_call_duration_seconds"))

    def durations(self, name: str, **labels: str) -> Durations:
        """A histogram, its series added up but for watchers'."""
        counts: dict[float, float] = defaultdict(float)
        for found, value in self._of(f"{name}_bucket", labels):
            if not found.get("route", "").startswith(WATCHERS):
                counts[float(found["le"])] += value
        bounds = tuple(sorted(counts))
        sum_s = sum(
            value
            for found, value in self._of(f"{name}_sum", labels)
            if not found.get("route", "").startswith(WATCHERS)
        )
        return Durations(bounds[:-1], tuple(counts[bound] for bound in bounds), sum_s)

    def tenants(self) -> tuple[TenantShown, ...]:
        """Every tenant that has called, by name."""
        names = {
            labels["tenant"]
            for name in ("gateway_tenant_calls_total", "gateway_quota_decisions_total")
            for labels, _ in self._samples[name]
        }
        return tuple(self._tenant(name) for name in sorted(names))

    def _tenant(self, name: str) -> TenantShown:
        return TenantShown(
            name,
            int(self.number("gateway_tenant_calls_total", tenant=name)),
            int(self.number("gateway_inputs_total", tenant=name)),
            int(self.number("gateway_tokens_total", tenant=name)),
            int(self.number("gateway_quota_decisions_total", tenant=name, decision="refused")),
        )

    def _of(self, name: str, labels: Labels) -> list[tuple[Labels, float]]:
        return [(found, value) for found, value in self._samples[name] if labels.items() <= found.items()]
