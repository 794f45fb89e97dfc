"""What becomes of an engine's models in memory, as Prometheus is told."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.events import ModelStateReported


class ModelMetrics:
    """What becomes of an engine's models in memory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Upstreams that there are gauges of.
        self._known: set[str] = set()
        self._loaded = Gauge(
            "gateway_model_loaded",
            "1 while an engine's model is in memory.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._memory = Gauge(
            "gateway_model_memory_bytes",
            "What an engine's model holds of memory.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._loads = Counter(
            "gateway_model_loads", "Loads of a model.", ["upstream", "outcome"], registry=registry
        )
        self._unloads = Counter(
            "gateway_model_unloads",
            "Times that a model left memory.",
            ["upstream", "reason"],
            registry=registry,
        )
        self._out_of_memory = Counter(
            "gateway_model_out_of_memory",
            "Batches that found too little memory and were split.",
            ["upstream"],
            registry=registry,
        )

    def observe(self, event: ModelStateReported, *, counts: bool) -> None:
        """counts: whether this process is the one that adds up."""
        self._known.add(event.upstream)
        self._loaded.labels(event.upstream).set(1 if event.loaded else 0)
        self._memory.labels(event.upstream).set(event.memory_bytes)
        if not counts:
            return
        self._loads.labels(event.upstream, "ok").inc(event.loads)
        self._loads.labels(event.upstream, "failed").inc(event.failed_loads)
        self._out_of_memory.labels(event.upstream).inc(event.out_of_memory)
        for reason, times in event.unloads.items():
            self._unloads.labels(event.upstream, reason).inc(times)

    def keep_only(self, upstreams: Collection[str], *, removes: bool) -> None:
        """All others are no more. removes: or they stand at 0, where several processes have files of them."""
        for upstream in self._known.difference(upstreams):
            for gauge in (self._loaded, self._memory):
                gauge.labels(upstream).set(0)
                if removes:
                    gauge.remove(upstream)
        self._known.intersection_update(upstreams)
