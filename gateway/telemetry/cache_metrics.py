"""Metrics of the cache of vectors."""

from collections.abc import Callable

from gateway.events import CacheLookedUp
from gateway.telemetry.metric_factory import MetricFactory

# Bytes of all entries, and entries that were evicted or not stored since the start.
ReadCache = Callable[[], tuple[int, int]]


class CacheMetrics:
    """Texts found and not found by model, and the size of the store."""

    def __init__(self, create: MetricFactory) -> None:
        self._hits = create.counter("cache_hits", "Texts whose vectors were found in the cache.", ("model",))
        self._misses = create.counter(
            "cache_misses", "Texts that were looked up in the cache and not found.", ("model",)
        )
        self._bytes = create.gauge(
            "cache_bytes", "Bytes of all entries; of those in Redis, an upper bound.", (), "livesum"
        )
        self._evictions = create.counter(
            "cache_evictions", "Entries that left the cache, or were not stored, for want of room.", ()
        )
        self._counted_evictions = 0

    def observe(self, event: CacheLookedUp) -> None:
        """Count the lookup of a call."""
        self._hits.labels(event.model).inc(event.hits)
        self._misses.labels(event.model).inc(event.misses)

    def refresh(self, read: ReadCache) -> None:
        """Read the store into the metrics."""
        size, evictions = read()
        self._bytes.set(size)
        self._evictions.inc(evictions - self._counted_evictions)
        self._counted_evictions = evictions
