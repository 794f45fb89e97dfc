"""Additions that gateways share in Redis: replaced whole, by who knows what stands."""

from collections.abc import AsyncIterator

import pytest

from gateway.additions.entries import Additions, Put
from gateway.additions.state import AdditionsState
from gateway.additions.store import ADDED, AdditionsInRedis
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from tests.quotas.redis_server import RedisServer
from tests.unit.test_addition_settings import TEI, file


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[AdditionsInRedis]:
    redis.command("FLUSHALL")
    one = AdditionsInRedis(RedisClient(redis.url, 5))
    yield one
    await one.aclose()


async def test_rejects_the_second_of_two_concurrent_changes(store: AdditionsInRedis) -> None:
    assert "" == await store.version() == (await store.load()).version
    first = await store.replace("", Additions({"two": TEI}))
    late = await store.replace("", Additions({"three": TEI}))

    assert first is not None
    assert late is None
    assert first == await store.load()
    assert first.version == await store.version()
    second = await store.replace(first.version, Additions({"three": TEI}))
    assert second is not None
    assert second.version != first.version


@pytest.mark.parametrize("written", ["{", '{"upstreams": 5}', "[" * 5000])
async def test_logs_unreadable_additions_once_and_changes_nothing(
    store: AdditionsInRedis, redis: RedisServer, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = AdditionsState(store, {})
    redis.command("HSET", ADDED, "version", "v", "additions", written)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await kept.load()
        with pytest.raises(StoreUnavailable):
            await kept.preview(file(), Put("upstreams", "two", TEI))

    assert 1 == len([one for one in caplog.records if "cannot be read" in one.message])
    assert "v" == await store.version()


async def test_ignores_fields_of_another_release(store: AdditionsInRedis, redis: RedisServer) -> None:
    redis.command("HSET", ADDED, "version", "v", "additions", '{"upstreams": {"x": 5}, "later": {}}')
    standing = await store.load()
    found = await AdditionsState(store, {}).compose(file(), standing.additions)

    assert ({"one"}, {("upstreams", "x")}) == (found.config.upstreams.keys(), found.rejected.keys())
