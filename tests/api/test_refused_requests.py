"""Requests refused for their content cost one request; callers with a spent limit are refused unread."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.events import QuotaDecided
from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.api.test_quotas import OPENAI, Clock, embed, limited, tenants
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei

MANY = "requests_per_day: 10"
ONE = "requests_per_minute: 1"


async def unread() -> AsyncIterator[bytes]:
    """Fail the test if the gateway reads the body."""
    raise AssertionError("the body was read")
    yield b""


async def post_unread(gateway: Running, path: str = OPENAI, length: int = 100) -> httpx.Response:
    """Send a request whose body must not be read."""
    return await gateway.client.post(path, content=unread(), headers={"content-length": str(length)})


async def requests_left(gateway: Running) -> int:
    """Return the remaining requests, after one more."""
    return int((await embed(gateway)).headers["x-ratelimit-remaining-requests"])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (OPENAI, b"{", 400),
        (OPENAI, b'{"input": 5}', 400),
        (OPENAI, b'{"input": ""}', 400),
        (OPENAI, b'{"input": "a", "model": "nowhere"}', 404),
        (OPENAI, b'{"input": "a", "model": "cross"}', 400),
        ("/embed", b'{"inputs": 5}', 422),
        ("/rerank", b'{"texts": ["a"], "documents": ["a"], "query": "q"}', 422),
        ("/v1/encode/bge", b"[]", 400),
        ("/v2/rerank", b'{"query": "q", "documents": [{}]}', 400),
    ],
)
async def test_a_refused_request_costs_one_request(boot: Boots, path: str, body: bytes, status: int) -> None:
    ledger = MemoryLedger(Clock())
    async with boot(fakes(), tenants(MANY), ledger=ledger) as gateway:
        refused = await gateway.client.post(path, content=body)
        assert (status, "9") == (refused.status_code, refused.headers["x-ratelimit-remaining-requests"])
        assert "10" == refused.headers["x-ratelimit-limit-requests"]
        assert 8 == await requests_left(gateway)


async def test_an_announced_body_too_large_costs_one_request(boot: Boots) -> None:
    async with limited(boot, MANY) as gateway:
        assert 413 == (await post_unread(gateway, length=40_000_000)).status_code
        assert 8 == await requests_left(gateway)


async def test_a_request_that_can_never_pass_costs_one_request(boot: Boots) -> None:
    limits = f"{MANY}, inputs_per_day: 2"
    async with limited(boot, limits) as gateway:
        assert 400 == (await gateway.post(OPENAI, {"input": ["a"] * 3})).status_code
        assert 8 == await requests_left(gateway)


async def test_a_refused_request_is_429_once_the_requests_are_spent(boot: Boots) -> None:
    clock = Clock()
    async with limited(boot, ONE, clock) as gateway:
        bad = [await gateway.post(OPENAI, {"input": 5}) for _ in range(3)]
        clock.move(60)
        good = await embed(gateway)

    assert [400, 429, 429] == [reply.status_code for reply in bad]
    assert "60" == bad[1].headers["retry-after"]
    assert 200 == good.status_code


async def test_a_key_pays_for_its_refused_requests(boot: Boots) -> None:
    config = f"""{CONFIG}
tenants:
  acme: {{keys: [{{digest: "{key_digest(KEY)}", id: ci, limits: {{{ONE}}}}}, "{key_digest("second")}"]}}
"""
    async with boot({"tei-0": FakeTei()}, config, ledger=MemoryLedger(Clock())) as gateway:
        statuses = [(await gateway.post(OPENAI, {"input": 5})).status_code for _ in range(2)]
        other = await gateway.post(OPENAI, {"input": 5}, authorization="Bearer second")

    assert [400, 429] == statuses
    assert 400 == other.status_code


async def test_a_refused_request_leaves_no_row_of_usage(boot: Boots) -> None:
    ledger = MemoryLedger(Clock())
    async with boot({"tei-0": FakeTei()}, tenants(MANY), ledger=ledger) as gateway:
        await gateway.post(OPENAI, {"input": 5})
        await embed(gateway)

    rows = await ledger.usage("acme", ["2023-11-14"])
    assert [("bge", 1)] == [(row.model, row.requests) for row in rows]


async def test_an_uncharged_refusal_has_no_limits(boot: Boots) -> None:
    async with limited(boot, "tokens_per_day: 10") as gateway:
        refused = await gateway.post(OPENAI, {"input": 5})

    assert 400 == refused.status_code
    assert not [name for name in refused.headers if name.startswith("x-ratelimit")]


async def test_no_key_is_charged_for_a_missing_or_wrong_key(boot: Boots) -> None:
    async with limited(boot, MANY) as gateway:
        assert 401 == (await gateway.post(OPENAI, {"input": 5}, authorization="Bearer x")).status_code
        assert 9 == await requests_left(gateway)


@pytest.mark.parametrize("path", [OPENAI, "/embed", "/rerank", "/v1/encode/bge", "/tokenize"])
async def test_a_spent_tenant_is_refused_before_its_body_is_read(boot: Boots, path: str) -> None:
    clock = Clock()
    async with limited(boot, ONE, clock) as gateway:
        await embed(gateway)
        refused = await embed(gateway)
        clock.move(0.5)
        unread_reply = await post_unread(gateway, path)

    assert (429, 429) == (refused.status_code, unread_reply.status_code)
    assert ("60", "60") == (refused.headers["retry-after"], unread_reply.headers["retry-after"])
    assert "1m0s" == refused.headers["x-ratelimit-reset-requests"]
    assert "59.5s" == unread_reply.headers["x-ratelimit-reset-requests"]
    limits = [
        {name: value for name, value in reply.headers.items() if "limit-l" in name or "-rem" in name}
        for reply in (refused, unread_reply)
    ]
    assert limits[0] == limits[1]
    decisions = [event.decision for event in gateway.events if isinstance(event, QuotaDecided)]
    assert ["admitted", "refused", "refused"] == decisions


async def test_a_refusal_is_believed_for_a_second(boot: Boots) -> None:
    clock = Clock()
    async with limited(boot, ONE, clock) as gateway:
        await embed(gateway)
        await embed(gateway)
        clock.move(1)
        # The body raises when it is read.
        assert 500 == (await post_unread(gateway)).status_code


async def test_a_spent_tenant_passes_when_its_time_has_come(boot: Boots) -> None:
    clock = Clock()
    async with limited(boot, "requests_per_second: 2", clock) as gateway:
        statuses = [(await embed(gateway)).status_code for _ in range(4)]
        clock.move(0.5)
        after = await embed(gateway)

    assert [200, 200, 429, 429] == statuses
    assert 200 == after.status_code


async def test_an_unaffordable_request_does_not_refuse_a_cheaper_one(boot: Boots) -> None:
    async with limited(boot, "inputs_per_day: 10") as gateway:
        await gateway.post(OPENAI, {"input": ["a"] * 8})
        assert 429 == (await gateway.post(OPENAI, {"input": ["a"] * 3})).status_code
        assert 200 == (await embed(gateway)).status_code


async def test_tokenizing_stays_free_of_spent_tokens(boot: Boots) -> None:
    async with limited(boot, "tokens_per_day: 16") as gateway:
        # As many tokens as the model takes.
        await embed(gateway, "w " * 20)
        assert 429 == (await embed(gateway)).status_code
        assert 429 == (await post_unread(gateway)).status_code
        assert 200 == (await gateway.post("/tokenize", {"inputs": "a"})).status_code


async def test_a_settlement_ends_the_belief(boot: Boots) -> None:
    gate = Gate()
    # Reserved at 16 tokens, by its length, and settled at 4.
    limits = tenants("tokens_per_day: 16")
    async with boot({"tei-0": tei_with_hook(gate)}, limits, ledger=MemoryLedger(Clock())) as gateway:
        running = asyncio.create_task(embed(gateway, "word with-a-hyphen"))
        await until(lambda: gate.waiting == 1)
        refused = await embed(gateway)
        gate.opened.set()
        assert 200 == (await running).status_code
        after = await embed(gateway)

    assert (429, 200) == (refused.status_code, after.status_code)


async def test_shadow_mode_refuses_nobody(boot: Boots) -> None:
    config = "quotas: {shadow: true}\n" + tenants(ONE)
    async with boot({"tei-0": FakeTei()}, config, ledger=MemoryLedger(Clock())) as gateway:
        statuses: list[Any] = [(await embed(gateway)).status_code for _ in range(3)]
        statuses += [(await gateway.post(OPENAI, {"input": 5})).status_code for _ in range(2)]

    assert [200, 200, 200, 400, 400] == statuses
