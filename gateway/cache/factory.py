"""Creation of the cache from its settings."""

import time

from gateway.cache.call_cache import ItemCache, Store
from gateway.cache.memory_store import MemoryStore
from gateway.cache.redis_store import RedisBounds, RedisStore, open_redis_clients
from gateway.config.schema import CacheSettings
from gateway.events import Observe


def create_cache(settings: CacheSettings, quota_store: str, observe: Observe) -> ItemCache:
    """Return a cache that has contacted no store yet.

    quota_store: the `quotas.store` of the configuration.
    """
    return ItemCache(
        _store(settings, quota_store),
        observe,
        shared=settings.shared,
        is_charged=settings.charge == "full",
    )


def _store(settings: CacheSettings, quota_store: str) -> Store:
    if settings.store == "memory":
        return MemoryStore(settings.bytes, settings.ttl_s, time.monotonic)
    url = quota_store if settings.store == "redis" else settings.store
    clients = open_redis_clients(url, settings.timeout_ms / 1000)
    return RedisStore(clients, RedisBounds(settings.bytes, settings.ttl_s), time.monotonic)
