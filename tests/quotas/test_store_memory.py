"""Memory of a real Redis, and of the fullest of several."""

import asyncio

import pytest

from gateway.store.memory_use import StoreMemory, fullest
from gateway.store.redis_client import RedisClient
from tests.fakes.hooks import until
from tests.quotas.redis_server import RedisServer


async def read(url: str) -> tuple[int, int]:
    """Return the memory as it is first read, or (0, 0) if the server refuses or is away."""
    client = RedisClient(url, 2.0)
    memory = StoreMemory(client)
    memory.use = (-1, -1)
    following = asyncio.create_task(memory.follow())
    await until(lambda: memory.use != (-1, -1))
    following.cancel()
    await client.aclose()
    return memory.use


async def test_reads_the_memory_and_its_bound(own_redis: RedisServer) -> None:
    used, bound = await read(own_redis.url)
    own_redis.command("CONFIG", "SET", "maxmemory", "64mb")

    assert used > 100_000
    assert 0 == bound
    assert 64 * 1024 * 1024 == (await read(own_redis.url))[1]


async def test_server_that_refuses_or_is_away_reports_nothing(own_redis: RedisServer) -> None:
    own_redis.command("ACL", "SETUSER", "default", "-info")
    assert (0, 0) == await read(own_redis.url)
    own_redis.kill()
    assert (0, 0) == await read(own_redis.url)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [([], (0, 0)), ([(5, 0), (9, 0)], (9, 0)), ([(5, 10), (9, 100), (50, 0)], (5, 10))],
)
def test_fullest_is_the_nearest_to_its_bound(uses: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    assert expected == fullest({"used_memory": used, "maxmemory": bound} for used, bound in uses)
