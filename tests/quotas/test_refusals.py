"""Refused calls by tenant and day: shared in Redis, or kept in a file."""

from pathlib import Path

import pytest

from gateway.errors import QuotaUnavailable
from gateway.events import QuotaDecided
from gateway.quotas.refusals import Refusals
from gateway.store.redis_client import RedisClient
from tests.quotas.redis_server import RedisServer

DAY_S = 24 * 3600.0
REFUSED, ADMITTED = QuotaDecided("acme", "refused"), QuotaDecided("acme", "admitted")


class Clock:
    """Wall clock that a test moves."""

    now_s = 1_795_773_600.0

    def __call__(self) -> float:
        return self.now_s


async def test_gateways_count_together_in_redis(own_redis: RedisServer) -> None:
    clock, clients = Clock(), [RedisClient(own_redis.url, 5) for _ in range(2)]
    gateways = [Refusals(client, now_s=clock) for client in clients]
    for gateway in gateways:
        gateway.observe(REFUSED)
        gateway.observe(ADMITTED)
        gateway.observe(QuotaDecided("Ж", "refused"))
        await gateway.today()
    assert {"acme": 2, "Ж": 2} == await gateways[0].today()
    assert {"Ж": 2} == await gateways[1].today(["Ж", "none"])
    assert {} == await gateways[1].today([])
    clock.now_s += DAY_S
    gateways[0].observe(REFUSED)
    assert {"acme": 1} == await gateways[0].today()
    for client in clients:
        await client.aclose()


async def test_counts_wait_for_redis(own_redis: RedisServer) -> None:
    client = RedisClient(own_redis.url, 5)
    counted = Refusals(client, now_s=Clock())
    counted.observe(REFUSED)
    own_redis.kill()
    with pytest.raises(QuotaUnavailable):
        await counted.today()
    counted.observe(REFUSED)
    own_redis.restart()
    assert {"acme": 2} == await counted.today()
    await client.aclose()


@pytest.mark.parametrize("later_s", [0.0, DAY_S])
async def test_counts_of_a_day_are_kept_in_a_file(tmp_path: Path, later_s: float) -> None:
    clock, file = Clock(), tmp_path / "state" / "refusals.json"
    counted = Refusals(file=file, now_s=clock)
    counted.observe(REFUSED)
    await counted.write()
    clock.now_s += later_s
    again = Refusals(file=file, now_s=clock)
    again.observe(REFUSED)
    assert {"acme": 1 if later_s else 2} == await again.today()


async def test_a_file_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    file = tmp_path / "refusals.json"
    file.write_text("[{")
    assert {} == await Refusals(file=file).today()
