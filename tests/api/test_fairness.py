"""Fairness between tenants: the reserved last slot, priorities, and a tenant's queue bound."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, Running
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import Gate, until
from tests.fakes.tei import FakeTei

CONFIG = f"""
upstreams:
  one: {{backend: tei, replicas: ["http://tei-0"], in_flight_batches: 4}}
models: {{bge: {{upstream: one}}}}
tenants:
  flood: {{keys: ["{key_digest(KEY)}"], queue_tokens: 200}}
  victim: {{keys: ["{key_digest("victim-key")}"]}}
"""
VICTIM = {"authorization": "Bearer victim-key"}


async def until_queued(gateway: Running, calls: int) -> None:
    """Wait until this many calls of one input are queued."""
    lane = gateway.application.gateway.upstreams["one"].lanes["texts"]
    await until(lambda: lane.backlog().inputs == calls)


def gated() -> tuple[FakeTei, Gate]:
    server, gate = FakeTei(), Gate()
    server.hook = gate
    return server, gate


async def test_last_slot_is_reserved_while_another_tenant_is_active(boot: Boots) -> None:
    server, gate = gated()
    async with boot({"tei-0": server}, CONFIG) as gateway:
        gate.opened.set()
        await gateway.client.post("/embed", json={"inputs": "hello"}, headers=VICTIM)
        gate.opened.clear()
        calls = [asyncio.create_task(gateway.post("/embed", {"inputs": f"{i}"})) for i in range(8)]
        await until(lambda: gate.waiting == 3)
        victim = asyncio.create_task(gateway.client.post("/embed", json={"inputs": "mine"}, headers=VICTIM))
        await until(lambda: gate.waiting == 4)
        inputs = [body.get("input", body.get("inputs")) for _, body in server.requests]
        gate.opened.set()
        replies = await asyncio.gather(victim, *calls)

    assert ["mine"] == inputs[-1]
    assert {200} == {reply.status_code for reply in replies}


async def test_single_tenant_gets_the_whole_window(boot: Boots) -> None:
    server, gate = gated()
    async with boot({"tei-0": server}, CONFIG) as gateway:
        calls = [asyncio.create_task(gateway.post("/embed", {"inputs": f"{i}"})) for i in range(8)]
        await until(lambda: gate.waiting == 4)
        gate.opened.set()
        assert {200} == {(await call).status_code for call in calls}


async def test_two_tenants_share_a_request_if_tokens_are_counted(boot: Boots, tmp_path: Path) -> None:
    server, gate = gated()
    small_files = write_small_files(tmp_path)
    config = CONFIG.replace("in_flight_batches: 4", f"in_flight_batches: 1, tokenizer: {small_files}")
    body = {"input": "one"}
    async with boot({"tei-0": server}, config) as gateway:
        first = asyncio.create_task(gateway.post("/v1/embeddings", {"input": "first"}))
        await until(lambda: gate.waiting == 1)
        long_call = asyncio.create_task(gateway.post("/v1/embeddings", {"input": "one two three"}))
        await until_queued(gateway, 1)
        other_call = asyncio.create_task(gateway.client.post("/v1/embeddings", json=body, headers=VICTIM))
        await until_queued(gateway, 2)
        gate.opened.set()
        replies = await asyncio.gather(long_call, other_call, first)

    assert [5, 3, 3] == [reply.json()["usage"]["prompt_tokens"] for reply in replies]
    assert ["one", "one two three"] == sorted(server.requests[-1][1]["input"])


async def test_call_may_lower_its_own_priority(boot: Boots) -> None:
    server, gate = gated()
    async with boot({"tei-0": server}, CONFIG) as gateway:

        def call(text: str, **headers: str) -> asyncio.Task[Any]:
            return asyncio.create_task(gateway.post("/embed", {"inputs": text}, **headers))

        held = [call(f"held {i}") for i in range(4)]
        await until(lambda: gate.waiting == 4)
        bulk = call("bulk", x_priority="bulk")
        await until_queued(gateway, 1)
        query = call("query", x_priority="interactive")
        await until_queued(gateway, 2)
        gate.opened.set()
        await asyncio.gather(*held, bulk, query)

        metrics = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text

    texts = [body.get("input", body.get("inputs"))[0] for _, body in server.requests]
    assert texts.index("query") < texts.index("bulk")
    assert 'gateway_bulk_duration_seconds_count{route="/embed"} 1.0' in metrics


async def test_the_priority_of_a_body_counts_as_bulk(boot: Boots) -> None:
    ranked = {"query": "q", "documents": ["a"], "model": "bge"}
    embedded = {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"], "model": "bge"}
    async with boot({"tei-0": FakeTei()}, CONFIG) as gateway:
        for path, body in (("/v1/rerank", ranked), ("/v2/rerank", ranked), ("/v2/embed", embedded)):
            for priority in (0, 7):
                reply = await gateway.post(path, body | {"priority": priority})
                assert 200 == reply.status_code, reply.text
        metrics = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text

    for path in ("/v1/rerank", "/v2/rerank", "/v2/embed"):
        assert f'gateway_bulk_duration_seconds_count{{route="{path}"}} 1.0' in metrics


@pytest.mark.parametrize("priority", ["urgent", ""])
async def test_rejects_an_unknown_priority(boot: Boots, priority: str) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": "a"}, x_priority=priority)

    assert (400, "x-priority") == (reply.status_code, reply.json()["error"]["param"])


async def test_tenant_past_its_queue_bound_gets_429_and_other_tenants_do_not(boot: Boots) -> None:
    server, gate = gated()
    async with boot({"tei-0": server}, CONFIG) as gateway:
        calls = [asyncio.create_task(gateway.post("/embed", {"inputs": f"{i:030}"})) for i in range(30)]
        await until(lambda: sum(call.done() for call in calls) > 5)
        refused = next(call for call in calls if call.done()).result()
        victim = asyncio.create_task(gateway.client.post("/embed", json={"inputs": "a"}, headers=VICTIM))
        gate.opened.set()
        assert 200 == (await victim).status_code
        await asyncio.gather(*calls)

    assert (429, "Overloaded") == (refused.status_code, refused.json()["error_type"])
    # Nothing has completed yet, therefore the lane has no drain rate to compute a longer wait from.
    assert "1" == refused.headers["retry-after"]
