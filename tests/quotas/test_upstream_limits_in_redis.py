"""Limits of an upstream's account, and of end users, on one Redis: gateways together never exceed them."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.quotas.operations import keys_of
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei, is_probe
from tests.quotas.redis_server import RedisServer

CALLS = 30
AMOUNT = 11
CONFIG = """
quotas: {{store: "{store}", timeout_ms: 5000}}
end_users: {{from: [user], most: 3}}
upstreams:
  {upstream}:
    backend: tei
    replicas: ["http://tei-0", "http://tei-1"]
    limits: {{requests_per_day: {amount}, tokens_per_day: 10000}}
models: {{bge: {{upstream: {upstream}}}}}
tenants: {{acme: {{keys: ["{digest}"], end_user_limits: {{{limits}}}}}}}
"""


@asynccontextmanager
async def gateways(
    boot: Boots, redis: RedisServer, amount: int = AMOUNT, limits: str = ""
) -> AsyncIterator[tuple[list[Running], list[FakeTei]]]:
    """Run two gateways with the same two servers."""
    servers = [FakeTei(), FakeTei()]
    upstream = f"one-{secrets.token_hex(4)}"
    text = CONFIG.format(
        store=redis.url, upstream=upstream, amount=amount, digest=key_digest(KEY), limits=limits
    )
    async with AsyncExitStack() as stack:
        by_host = {f"tei-{number}": server for number, server in enumerate(servers)}
        yield [await stack.enter_async_context(boot(by_host, text)) for _ in range(2)], servers


def sent(servers: list[FakeTei]) -> int:
    return sum(not is_probe(body) for server in servers for path, body in server.requests if "embed" in path)


async def test_gateways_together_send_no_more_than_an_account_allows(
    boot: Boots, own_redis: RedisServer
) -> None:
    async with gateways(boot, own_redis) as (both, servers):
        # Each is too long to share a request with another.
        text = "word " * 300
        calls = [
            both[number % 2].post("/v1/embeddings", {"input": f"{number} {text}"}) for number in range(CALLS)
        ]
        replies = await asyncio.gather(*calls)

    statuses = [reply.status_code for reply in replies]
    assert {200, 429} == {*statuses}
    assert AMOUNT >= sent(servers)
    # Every request that the account allowed was sent.
    assert AMOUNT == sent(servers)


async def test_failures_are_refunded_to_the_account(boot: Boots, own_redis: RedisServer) -> None:
    async with gateways(boot, own_redis, amount=4) as (both, servers):
        failing = 2

        async def fail(path: str, body: object) -> tuple[int, bytes] | None:
            nonlocal failing
            failing -= 1
            return (500, b"") if failing >= 0 else None

        for server in servers:
            server.hook = fail
        statuses = []
        for number in range(8):
            reply = await both[number % 2].post("/v1/embeddings", {"input": f"text {number}"})
            statuses.append(reply.status_code)

    # Two requests failed and cost nothing: four succeed, whether or not the failed ones were tried again.
    assert 4 == statuses.count(200)
    assert 429 == statuses[-1]


@pytest.mark.parametrize("user", ["ann", None])
async def test_gateways_count_an_end_user_together(
    boot: Boots, own_redis: RedisServer, user: str | None
) -> None:
    limits = "requests_per_day: 7"
    async with gateways(boot, own_redis, amount=1000, limits=limits) as (both, _):
        calls = [
            both[number % 2].post("/v1/embeddings", {"input": "a", "user": user}) for number in range(CALLS)
        ]
        replies = await asyncio.gather(*calls)

    assert (7 if user else CALLS) == [reply.status_code for reply in replies].count(200)


async def test_names_do_not_fill_redis(boot: Boots, own_redis: RedisServer) -> None:
    async with gateways(boot, own_redis, amount=1000, limits="requests_per_day: 100") as (both, _):
        calls = [
            both[number % 2].post("/v1/embeddings", {"input": "a", "user": secrets.token_hex(200)})
            for number in range(CALLS)
        ]
        replies = await asyncio.gather(*calls)
    fields = own_redis.command("HKEYS", keys_of("acme")[0])

    assert {200} == {reply.status_code for reply in replies}
    # Three by name, and that of all others.
    assert 4 == fields.count("end user ")
    assert len(fields) < 1000
