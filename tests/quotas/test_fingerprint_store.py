"""Fingerprints shared in Redis: the first gateway writes it, and an outage blocks no replica."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from backends.contract import Capabilities, Embed, EmbedReply, Operation, Reply, Work
from backends.reference_texts import EDITION
from gateway.config.schema import UpstreamSettings
from gateway.events import Event, SpaceChecked
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.vector_spaces import space as spaces
from gateway.vector_spaces.fingerprint import Fingerprint, fingerprint_of
from gateway.vector_spaces.space import VectorSpace
from gateway.vector_spaces.store import SPACES, FingerprintStore
from tests.fakes.tei import vector_of
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

UPSTREAM = UpstreamSettings(backend="tei", replicas=("http://up",), attempt_timeout_s=1)
CAPABILITIES = Capabilities("org/model", frozenset({Operation.EMBED}), dtype="float32")


class Model:
    """A replica of a model; another name means other vectors."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return CAPABILITIES

    async def run(self, work: Work, timeout_s: float) -> Reply:  # noqa: ARG002
        assert isinstance(work, Embed)
        return EmbedReply(np.stack([vector_of(self.name + text) for text in work.inputs]), 1)

    async def aclose(self) -> None:
        pass


class Gateway:
    """One gateway with the upstream `up`. alarms: outcomes that changed."""

    def __init__(self, server: RedisServer) -> None:
        self.events: list[Event] = []
        self.store = FingerprintStore(RedisClient(server.url, 1.0))
        self.space = VectorSpace("up", UPSTREAM, self.store, self.events.append)

    async def check(self, model: Model, replica: str = "r0") -> bool:
        """Return True if a replica of this model may join."""
        return await self.space.check(replica, model, CAPABILITIES)

    @property
    def alarms(self) -> list[str]:
        return [event.outcome for event in self.events if isinstance(event, SpaceChecked) and event.changed]


@pytest.fixture
async def gateways(own_redis: RedisServer) -> AsyncIterator[list[Gateway]]:
    """Return three gateways that share one Redis."""
    several = [Gateway(own_redis) for _ in range(3)]
    yield several
    for gateway in several:
        await gateway.store.aclose()


def fingerprint_named(name: str) -> Fingerprint:
    """Return the fingerprint of another model."""
    rows = np.stack([vector_of(f"{name}{i}") for i in range(6)])
    return fingerprint_of(rows, "tei", CAPABILITIES)


async def test_first_of_concurrent_claims_wins(gateways: list[Gateway]) -> None:
    store = gateways[0].store
    claimed = await asyncio.gather(*(store.claim("up", fingerprint_named(str(i))) for i in range(20)))

    assert 1 == len({fingerprint.id for fingerprint in claimed})
    assert claimed[0] == await gateways[1].store.load("up")
    assert await store.load("other") is None


async def test_later_gateway_compares_with_the_stored_fingerprint(gateways: list[Gateway]) -> None:
    first, second, _ = gateways
    assert await first.check(Model())
    assert not await second.check(Model("other "))
    assert await second.check(Model())

    assert first.space.id == second.space.id is not None
    assert ["differs", "fits"] == second.alarms


async def test_follows_an_accepted_fingerprint_and_rejudges_replicas(
    gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces, "FOLLOW_EVERY_S", 0.01)
    first, second, operator = gateways
    await first.check(Model())
    await second.check(Model("other "), "r1")
    accepted = second.space._fingerprints["r1"]
    following = [asyncio.create_task(gateway.space.follow_store()) for gateway in (first, second)]
    await operator.store.replace("up", accepted)
    async with asyncio.timeout(PATIENCE_S):
        while not (first.space.is_foreign("r0") and not second.space.is_foreign("r1")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)

    assert accepted.id == first.space.id == second.space.id
    assert (["fits", "differs"], ["differs", "fits"]) == (first.alarms, second.alarms)


async def test_replica_joins_on_the_local_fingerprint_while_redis_is_frozen(
    gateways: list[Gateway], own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.freeze()
    first = gateways[0]
    async with asyncio.timeout(PATIENCE_S):
        assert await first.check(Model())
        assert not await first.check(Model("other "), "r1")
        assert not await first.check(Model("other "), "r1")
    own_redis.thaw()

    assert first.space.id is not None
    assert 1 == sum("fingerprints cannot be shared" in record.message for record in caplog.records)


async def test_stores_the_local_fingerprint_after_an_outage(
    gateways: list[Gateway], own_redis: RedisServer
) -> None:
    own_redis.kill()
    first, second, third = gateways
    await first.check(Model())
    await second.check(Model("other "))
    with pytest.raises(StoreUnavailable):
        await first.space.follow(first.store)
    own_redis.restart()
    await first.space.follow(first.store)
    await second.space.follow(second.store)

    assert first.space.id == second.space.id
    assert await third.check(Model())
    assert (["fits"], ["fits", "differs"]) == (first.alarms, second.alarms)


async def test_compares_replicas_of_an_outage_at_their_next_join(
    gateways: list[Gateway], own_redis: RedisServer
) -> None:
    first, second, _ = gateways
    own_redis.kill()
    assert await first.check(Model("other "))
    own_redis.restart()
    await second.check(Model())

    assert await first.check(Model(), "r1")
    assert first.space.is_foreign("r0")
    assert ["fits", "differs", "fits"] == first.alarms


async def test_restores_the_fingerprint_after_data_loss(
    gateways: list[Gateway], own_redis: RedisServer
) -> None:
    first = gateways[0]
    await first.check(Model())
    own_redis.command("FLUSHALL")
    await first.space.follow(first.store)

    assert await first.store.load("up") == first.space.reference is not None


async def test_ignores_an_unreadable_fingerprint(gateways: list[Gateway], own_redis: RedisServer) -> None:
    own_redis.command("HSET", SPACES, "up", "nonsense")
    first = gateways[0]

    assert await first.check(Model())
    assert not await first.check(Model("other "), "r1")
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        await first.store.load("up")


def test_other_reference_texts_use_another_key() -> None:
    assert SPACES.endswith(f":{EDITION}")
