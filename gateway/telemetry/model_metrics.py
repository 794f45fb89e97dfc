"""Metrics of the models that engines load and unload."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.events import ModelStateReported


class ModelMetrics:
    """Metrics of loaded models: memory, loads and unloads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Upstreams that have gauges.
        self._upstreams: set[str] = set()
        self._loaded = Gauge(
            "gateway_model_loaded",
            "1 while an engine's model is in memory.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._memory = Gauge(
            "gateway_model_memory_bytes",
            "Memory that an engine's model uses.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._loads = Counter(
            "gateway_model_loads", "Loads of a model.", ["upstream", "outcome"], registry=registry
        )
        self._unloads = Counter(
            "gateway_model_unloads",
            "Times that a model was unloaded.",
            ["upstream", "reason"],
            registry=registry,
        )
        self._out_of_memory = Counter(
            "gateway_model_out_of_memory",
            "Batches that did not fit into memory and were split.",
            ["upstream"],
            registry=registry,
        )

    def observe(self, event: ModelStateReported, *, counts: bool) -> None:
        """Record a report. counts: this process adds to the counters, and not to the gauges only."""
        self._upstreams.add(event.upstream)
        self._loaded.labels(event.upstream).set(1 if event.loaded else 0)
        self._memory.labels(event.upstream).set(event.memory_bytes)
        if not counts:
            return
        self._loads.labels(event.upstream, "ok").inc(event.loads)
        self._loads.labels(event.upstream, "failed").inc(event.failed_loads)
        self._out_of_memory.labels(event.upstream).inc(event.out_of_memory)
        for reason, times in event.unloads.items():
            self._unloads.labels(event.upstream, reason).inc(times)

    def keep_only(self, upstreams: Collection[str], *, removes_series: bool) -> None:
        """Drop the gauges of all other upstreams.

        removes_series: delete them; several workers can only set theirs to 0, because they are in files.
        """
        for upstream in self._upstreams.difference(upstreams):
            for gauge in (self._loaded, self._memory):
                gauge.labels(upstream).set(0)
                if removes_series:
                    gauge.remove(upstream)
        self._upstreams.intersection_update(upstreams)
