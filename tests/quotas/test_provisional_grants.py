"""Calls with ample room reach the replica before the ledger answers, and their callers only afterwards.

Over real sockets and a real Redis, which the tests freeze to have its answer outstanding.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import pytest

from gateway.quotas.ledger import LEASE_US, QuotaRequest, Reservation
from gateway.quotas.limits import Cost, Limit
from gateway.quotas.local_share import AMPLE_COSTS, LocalShare
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.hooks import Gate
from tests.fakes.tei import FakeTei, Hook
from tests.quotas.redis_server import RedisServer
from tests.socket_gateway import SocketGateway, socket_gateway, wait_for_value
from tests.waiting import PATIENCE_S

CONFIG = """
quotas: {{store: "{store}", timeout_ms: 20000}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{digest}"], limits: {{requests_per_day: 1000}}}}}}
"""
DAY = Limit("requests", "day", 1000)


class LoneCall(NamedTuple):
    """A call that its replica holds while the store is frozen. other: the ledger of another gateway."""

    gateway: SocketGateway
    reply: "asyncio.Task[httpx.Response]"
    other: RedisLedger
    spending: "asyncio.Task[Reservation]"

    async def used(self) -> int:
        """Return the requests that the store has counted today."""
        await self.gateway.application.gateway._admission.ledger.flush()
        spent = await self.spending
        self.other.settle(spent, spent.request.cost)
        probe = await self.other.reserve(quota_request("probe", 0))
        self.other.settle(probe, Cost(0))
        await self.other.flush()
        return DAY.amount - probe.limit_statuses[0].remaining


def quota_request(id_: str, requests: int) -> QuotaRequest:
    return QuotaRequest(id_, "acme", (DAY,), Cost(requests), LEASE_US, shadow=not requests)


@asynccontextmanager
async def lone_call(
    redis: RedisServer, server: FakeTei, hook: Hook, gate: Gate, spent: int = 0
) -> AsyncIterator[LoneCall]:
    """Send a call while the store is frozen, after one that has shown the limits; hook: of its replica.

    spent: requests of the other gateway, which the store has received before those of the call.
    """
    config = CONFIG.format(store=redis.url, digest=key_digest(KEY))
    other = RedisLedger(RedisClient(redis.url, 20.0), OutagePolicy(), "other", lambda _: None)
    async with socket_gateway(server, config) as gateway, asyncio.timeout(PATIENCE_S):
        assert (await gateway.call()).headers["x-ratelimit-remaining-requests"] == "999"
        # Opens the other gateway's connection.
        other.settle(await other.reserve(quota_request("first", 0)), Cost(0))
        await other.flush()
        server.hook = hook
        redis.freeze()
        spending = asyncio.create_task(other.reserve(quota_request("others", spent)))
        await asyncio.sleep(0)
        call = asyncio.create_task(gateway.call())
        await wait_for_value(1, lambda: gate.waiting)
        try:
            yield LoneCall(gateway, call, other, spending)
        finally:
            await other.aclose()


async def test_the_reply_waits_for_the_ledger(own_redis: RedisServer) -> None:
    gate = Gate()
    async with lone_call(own_redis, FakeTei(), gate, gate) as lone:
        gate.opened.set()
        await wait_for_value(0, lambda: gate.waiting)
        done, _ = await asyncio.wait([lone.reply], timeout=0.1)
        assert not done, "the ledger has not answered"
        own_redis.thaw()
        reply = await lone.reply
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-remaining-requests"] == "998"
        assert await lone.used() == 2


async def test_a_refusal_withholds_the_reply_and_charges_nothing(own_redis: RedisServer) -> None:
    gate = Gate()
    async with lone_call(own_redis, FakeTei(), gate, gate, spent=999) as lone:
        gate.opened.set()
        await wait_for_value(0, lambda: gate.waiting)
        own_redis.thaw()
        reply = await lone.reply
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "insufficient_quota"
        assert "embedding" not in reply.text
        assert await lone.used() == 1000


@pytest.mark.parametrize(("status", "used"), [(500, 1), (422, 2)])
async def test_a_call_that_fails_first_is_settled_when_the_ledger_answers(
    own_redis: RedisServer, status: int, used: int
) -> None:
    """A fault of the replica is refunded, and a fault of the caller charged, as with any grant."""
    gate = Gate()

    async def failing(*request: object) -> tuple[int, bytes]:
        await gate(*request)
        return status, b'{"error": "no", "error_type": "Validation"}'

    async with lone_call(own_redis, FakeTei(), failing, gate) as lone:
        gate.opened.set()
        own_redis.thaw()
        assert (await lone.reply).status_code == {500: 502, 422: 400}[status]
        assert await lone.used() == used


async def test_only_one_call_of_a_tenant_goes_ahead(own_redis: RedisServer) -> None:
    gate = Gate()
    async with lone_call(own_redis, FakeTei(), gate, gate) as lone:
        calls = [asyncio.create_task(lone.gateway.call()) for _ in range(5)]
        await wait_for_value(6, lambda: lone.gateway.application.in_flight.calls)
        done, _ = await asyncio.wait(calls, timeout=0.1)
        assert (set(), 1) == (done, gate.waiting)
        gate.opened.set()
        own_redis.thaw()
        assert {200} == {reply.status_code for reply in await asyncio.gather(lone.reply, *calls)}
        assert await lone.used() == 7


async def test_a_caller_that_disconnects_leaves_nothing_open(own_redis: RedisServer) -> None:
    gate = Gate()
    async with lone_call(own_redis, FakeTei(), gate, gate) as lone:
        lone.reply.cancel()
        await wait_for_value(0, lambda: gate.waiting)
        own_redis.thaw()
        await wait_for_value(0, lambda: lone.gateway.application.in_flight.calls)
        # The replica had begun.
        assert await lone.used() == 2
        assert own_redis.command("HLEN", "gw:{acme}:open") == ":0\r\n"


def test_room_is_ample_only_for_known_limits_with_half_and_much_more_than_the_cost_left() -> None:
    share = LocalShare()

    def is_ample(limit: Limit, cost: Cost, *used: int) -> bool:
        if used:
            share.record("acme", [(limit, (used[0], 1_000_000))], is_down=False)
        return share.has_ample_room(QuotaRequest("id", "acme", (limit,), cost, LEASE_US))

    tokens = Limit("tokens", "day", 100_000)
    assert not is_ample(tokens, Cost(tokens=1)), "not seen yet"
    assert is_ample(tokens, Cost(tokens=500), 50_000)
    assert not is_ample(tokens, Cost(tokens=500), 50_001)
    assert is_ample(tokens, Cost(tokens=100_000 // AMPLE_COSTS), 0)
    assert not is_ample(tokens, Cost(tokens=100_000 // AMPLE_COSTS + 1), 0)
    assert not is_ample(Limit("requests", "in_flight", AMPLE_COSTS - 1), Cost(), 0)
    assert is_ample(Limit("requests", "in_flight", AMPLE_COSTS), Cost(), 0)
