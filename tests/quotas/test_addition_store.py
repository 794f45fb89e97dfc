"""Additions shared in Redis: replaced as a whole, and only if the version has not changed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.declared.additions import Additions, Put
from gateway.declared.composition import AdditionsState
from gateway.declared.store import ADDED, AdditionsInRedis
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from tests.fakes.hooks import until
from tests.quotas.redis_server import RedisServer
from tests.unit.test_addition_settings import TEI, file
from tests.waiting import PATIENCE_S


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[AdditionsInRedis]:
    redis.command("FLUSHALL")
    additions = AdditionsInRedis(RedisClient(redis.url, 5))
    yield additions
    await additions.aclose()


async def test_rejects_the_second_of_two_concurrent_changes(store: AdditionsInRedis) -> None:
    assert "" == await store.version() == (await store.load()).version
    first = await store.replace("", Additions({"two": TEI}), ())
    late = await store.replace("", Additions({"three": TEI}), ())

    assert first is not None
    assert late is None
    assert first == await store.load()
    assert first.version == await store.version()
    second = await store.replace(first.version, Additions({"three": TEI}), ())
    assert second is not None
    assert second.version != first.version


async def test_an_emptied_redis_removes_nothing(
    store: AdditionsInRedis, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    state = AdditionsState(store, {})
    kept = await store.replace("", Additions({"two": TEI}, drained={"one": ("http://one",)}), ())
    assert kept is not None
    state.adopt(kept, await state.compose(file(), kept.additions))
    reported = asyncio.Event()

    async def on_change() -> None:
        reported.set()

    redis.command("FLUSHALL")
    following = asyncio.create_task(state.follow(on_change))
    await until(
        lambda: "Redis has lost the additions (upstreams: 1, models: 0, drained replicas: 1)" in caplog.text
    )
    assert not reported.is_set()
    wanted, record = await state.preview(file(), Put("upstreams", "three", TEI))
    stored = await state.store(wanted, record)
    await asyncio.wait_for(reported.wait(), PATIENCE_S)
    following.cancel()

    assert stored is not None
    assert {"two", "three"} == stored.additions.upstreams.keys()
    assert kept.additions.drained == stored.additions.drained


@pytest.mark.parametrize("written", ["{", '{"upstreams": 5}', "[" * 5000])
async def test_logs_unreadable_additions_once_and_changes_nothing(
    store: AdditionsInRedis, redis: RedisServer, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = AdditionsState(store, {})
    redis.command("HSET", ADDED, "version", "v", "additions", written)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await state.load()
        with pytest.raises(StoreUnavailable):
            await state.preview(file(), Put("upstreams", "two", TEI))

    assert 1 == len([record for record in caplog.records if "cannot be read" in record.message])
    assert "v" == await store.version()


async def test_ignores_fields_of_another_release(store: AdditionsInRedis, redis: RedisServer) -> None:
    redis.command("HSET", ADDED, "version", "v", "additions", '{"upstreams": {"x": 5}, "later": {}}')
    stored = await store.load()
    composed = await AdditionsState(store, {}).compose(file(), stored.additions)

    assert ({"one"}, {("upstreams", "x")}) == (composed.config.upstreams.keys(), composed.rejected.keys())


async def test_reads_former_keys_and_writes_the_current_ones(
    store: AdditionsInRedis, redis: RedisServer
) -> None:
    written = (
        '{"upstreams": {"x": {"backend": "tei", "batch_inputs": 3, "batch_bytes": 4, "request_bytes": 5}}}'
    )
    redis.command("HSET", ADDED, "version", "v", "additions", written)
    stored = await store.load()
    await store.replace("v", stored.additions, ())
    current = redis.command("HGET", ADDED, "additions")

    assert {"x": {"backend": "tei", "request_inputs": 3, "request_bytes": 5}} == stored.additions.upstreams
    assert "request_inputs" in current
    assert "batch_" not in current
