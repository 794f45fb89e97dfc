"""The store of the cache in a real Redis: its bound, its time to live, epochs, and outages."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway.cache.entries import SHARED
from gateway.cache.redis_store import ENTRY_OVERHEAD, RedisBounds, RedisStore, open_redis_clients
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

ENTRY = bytes(range(256)) * 2
KEYS = [bytes([number]) * 32 for number in range(10)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("cache"))
    yield server
    server.stop()


@asynccontextmanager
async def store_on(server: RedisServer, size: int = 10**6, ttl_s: float = 60.0) -> AsyncIterator[RedisStore]:
    """Yield a store on an empty server."""
    server.command("FLUSHALL")
    store = RedisStore(open_redis_clients(server.url, 0.5), RedisBounds(size, ttl_s), time.monotonic)
    await store.follow()
    yield store
    await store.aclose()


async def written(store: RedisStore) -> None:
    """Wait for the writes in the background."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*store._writes)


async def test_entries_are_found_byte_for_byte_in_the_order_of_the_keys(server: RedisServer) -> None:
    async with store_on(server) as store:
        store.put([(key, ENTRY + key) for key in KEYS[:3]], SHARED)
        await written(store)
        found = await store.get([KEYS[2], KEYS[5], KEYS[0]], SHARED)

    assert [ENTRY + KEYS[2], None, ENTRY + KEYS[0]] == found


async def test_no_more_bytes_are_stored_than_the_bound(server: RedisServer) -> None:
    room = 3 * (len(ENTRY) + ENTRY_OVERHEAD + 80)
    async with store_on(server, room) as store:
        store.put([(key, ENTRY) for key in KEYS], SHARED)
        await written(store)
        found = [entry for entry in await store.get(KEYS, SHARED) if entry]

        assert 0 < len(found) <= 3
        assert len(KEYS) - len(found) == store.evictions
        assert store.size_bytes <= room


async def test_entries_expire(server: RedisServer) -> None:
    async with store_on(server, ttl_s=0.05) as store:
        store.put([(KEYS[0], ENTRY)], SHARED)
        await written(store)
        async with asyncio.timeout(PATIENCE_S):
            while await store.get([KEYS[0]], SHARED) != [None]:  # noqa: ASYNC110 - Redis has its own clock
                await asyncio.sleep(0.01)


async def test_an_epoch_reaches_the_other_gateways(server: RedisServer) -> None:
    async with store_on(server) as one:
        other = RedisStore(open_redis_clients(server.url, 0.5), RedisBounds(1000, 60), time.monotonic)
        unknown = other.epoch_of("up")
        one.distrust("up")
        at_once = one.epoch_of("up")
        await one.follow()
        await other.follow()
        followed = other.epoch_of("up")
        await other.aclose()

    assert (None, 1, 1) == (unknown, at_once, followed)


async def test_without_redis_every_lookup_is_a_miss_and_the_next_do_not_wait(server: RedisServer) -> None:
    async with store_on(server) as store:
        store.put([(KEYS[0], ENTRY)], SHARED)
        await written(store)
        server.freeze()
        try:
            first = await store.get(KEYS[:2], SHARED)
            is_paused = store._breaker.is_open
            store.put([(KEYS[1], ENTRY)], SHARED)
        finally:
            server.thaw()
        evicted = store.evictions
        store._breaker.record_success()
        again = await store.get(KEYS[:1], SHARED)

    assert [None, None] == first
    assert is_paused
    assert 1 == evicted
    assert [ENTRY] == again


async def test_one_tenant_leaves_room_for_the_others(server: RedisServer) -> None:
    each = len(ENTRY) + ENTRY_OVERHEAD + 75
    keys = [number.to_bytes(2, "big") * 16 for number in range(400)]
    async with store_on(server, 100 * each) as store:
        store.put([(key, ENTRY) for key in keys[:200]], "tenant greedy")
        await written(store)
        store.put([(key, ENTRY) for key in keys[200:220]], "tenant small")
        await written(store)
        greedy = [entry for entry in await store.get(keys[:200], "") if entry]
        small = [entry for entry in await store.get(keys[200:220], "") if entry]
        store.put([(key, ENTRY) for key in keys[220:400]], "tenant late")
        await written(store)
        late = [entry for entry in await store.get(keys[220:400], "") if entry]

    assert 74 <= len(greedy) <= 75
    # Three quarters of what the first has left.
    assert 18 <= len(small) <= 19
    assert 4 <= len(late) <= 5


async def test_a_shared_cache_can_be_filled(server: RedisServer) -> None:
    each = len(ENTRY) + ENTRY_OVERHEAD + 75
    async with store_on(server, 8 * each) as store:
        store.put([(key, ENTRY) for key in KEYS], SHARED)
        await written(store)
        found = [entry for entry in await store.get(KEYS, SHARED) if entry]

    assert 8 == len(found)
