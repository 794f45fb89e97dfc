"""Metrics of the shared store: if it is reachable, its keys and tenants, and their loss."""

from collections.abc import Callable

import msgspec

from gateway.events import StoreChanged, StoreLost
from gateway.telemetry.metric_factory import MetricFactory


class StoredCounts(msgspec.Struct, frozen=True):
    """Number of keys and tenants: in the store, and of those kept although it has lost them."""

    keys: int = 0
    tenants: int = 0
    kept_keys: int = 0
    kept_tenants: int = 0


ReadStored = Callable[[], StoredCounts]


class StoreMetrics:
    """Gauges and counters of the shared store."""

    def __init__(self, create: MetricFactory) -> None:
        self._changes = create.counter(
            "quota_store_changes", "Times that the quota store became unreachable, or recovered.", ("change",)
        )
        self._away = create.gauge(
            "quota_store_away", "1 while quotas are counted without their shared store.", (), "livemax"
        )
        self._keys = create.gauge(
            "store_keys", "Keys in the store of tenants and keys, as last read.", (), "livemax"
        )
        self._tenants = create.gauge(
            "store_tenants", "Tenants in the store of tenants and keys, as last read.", (), "livemax"
        )
        self._kept_keys = create.gauge(
            "store_kept_keys", "Keys that the store has lost and that are still valid.", (), "livemax"
        )
        self._kept_tenants = create.gauge(
            "store_kept_tenants", "Tenants that the store has lost and that are still valid.", (), "livemax"
        )
        self._losses = create.counter(
            "store_losses", "Times that the store had lost keys or tenants, of each worker.", ()
        )

    def observe(self, event: StoreChanged | StoreLost) -> None:
        """Count an event of the store."""
        match event:
            case StoreChanged():
                self._away.set(1 if event.away else 0)
                self._changes.labels("away" if event.away else "back").inc()
            case StoreLost() if not event.is_repeated:
                self._losses.inc()

    def refresh(self, read: ReadStored) -> None:
        """Read the numbers into the gauges."""
        counts = read()
        self._keys.set(counts.keys)
        self._tenants.set(counts.tenants)
        self._kept_keys.set(counts.kept_keys)
        self._kept_tenants.set(counts.kept_tenants)
