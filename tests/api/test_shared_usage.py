"""Calls of one tenant that share an upstream request: their tokens are shares, and the reply says so."""

import asyncio
from pathlib import Path

import httpx

from tests.conftest import Boots, Running
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import Gate, until
from tests.fakes.tei import FakeTei

CONFIG = """
upstreams: {u: {backend: tei, replicas: ["http://tei-0"], in_flight_batches: 1%s}}
models: {m: {upstream: u}}
"""


async def joined_calls(gateway: Running, server: FakeTei) -> list[httpx.Response]:
    """Return the replies to two calls that shared a request, because one before them held the only slot."""
    gate = Gate()
    server.hook = gate  # type: ignore[assignment]
    first = asyncio.create_task(gateway.post("/embed", {"inputs": "first"}))
    await until(lambda: gate.waiting == 1)
    calls = [asyncio.create_task(gateway.post("/embed", {"inputs": text})) for text in ("a", "b c d e f")]
    lane = gateway.application.gateway.upstreams["u"].lanes["texts"]
    await until(lambda: lane.backlog().inputs == 2)
    gate.opened.set()
    await first
    replies = await asyncio.gather(*calls)
    assert 2 == len(server.requests)
    return replies


async def test_calls_that_share_a_request_say_that_their_tokens_are_shares(boot: Boots) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}, CONFIG % "") as gateway:
        replies = await joined_calls(gateway, server)
        alone = await gateway.post("/embed", {"inputs": "alone"})

    assert ["shared", "shared"] == [reply.headers.get("x-usage") for reply in replies]
    assert 3 + 7 == sum(int(reply.headers["x-compute-tokens"]) for reply in replies)
    assert "x-usage" not in alone.headers


async def test_calls_whose_tokens_the_gateway_counts_have_their_own(boot: Boots, tmp_path: Path) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}, CONFIG % f", tokenizer: {write_small_files(tmp_path)}") as gateway:
        replies = await joined_calls(gateway, server)

    assert ["3", "7"] == [reply.headers["x-compute-tokens"] for reply in replies]
    assert all("x-usage" not in reply.headers for reply in replies)
