"""Bounds of a TEI server that its `/info` tells or only its refusals do: permits, bytes, truncation.

The servers are on real ports. They answer as the recorded ones (`tests/golden/tei/http.jsonl`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.conftest import Boots, Running
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei, assert_vectors
from tests.fakes.threaded import serve_in_thread

TEXT_BYTES = 80_000


async def busy(*_: Any) -> None:
    """Compute for a moment, so that requests overlap."""
    await asyncio.sleep(0.002)


class PatientTei(FakeTei):
    """Server that lets no request pass until it has refused this many for want of permits."""

    def __init__(self, refusals: int, **info: Any) -> None:
        super().__init__(**info)
        self.refusals = refusals

    def _take_permits(self, permits: int) -> None:
        if self.refusals and permits:
            self.refusals -= 1
            permits = 10**9
        super()._take_permits(permits)


def large_texts_tei(**info: Any) -> FakeTei:
    """Return a server that reads large texts, and accepts three of them in a request."""
    server = FakeTei(max_client_batch_size=32, max_input_length=512, **info)
    server.payload_limit = 300_000
    return server


@asynccontextmanager
async def served(boot: Boots, server: FakeTei, settings: str = "", model: str = "") -> AsyncIterator[Running]:
    """Serve on a port and yield a gateway in front."""
    server.hook = busy
    with serve_in_thread(server) as url:
        config = f"upstreams: {{only: {{backend: tei, replicas: ['{url}']{settings}}}}}\n"
        config += f"models: {{m: {{upstream: only{model}}}}}\n"
        async with boot({}, config, sockets=True) as gateway:
            yield gateway


def text_of(index: int, size: int = TEXT_BYTES) -> str:
    return f"{index} ".ljust(size, "x")


async def embed(gateway: Running, *texts: str) -> httpx.Response:
    return await gateway.post("/v1/embeddings", {"input": list(texts), "model": "m"})


def sizes(server: FakeTei) -> list[int]:
    return [len(body["input"]) for _, body in server.requests]


async def test_server_with_fewer_permits_than_reference_texts_joins_and_serves(boot: Boots) -> None:
    server = FakeTei(max_concurrent_requests=2, max_client_batch_size=32)
    texts = [f"text {i}" for i in range(10)]
    async with served(boot, server) as gateway:
        replies = await asyncio.gather(*(embed(gateway, *texts) for _ in range(4)))

    for reply in replies:
        assert_vectors(reply, *texts)
    assert 2 == max(sizes(server)) == server.most_in_flight
    assert 0 == server.refused


async def test_server_that_is_busy_when_it_is_probed_joins_text_by_text(boot: Boots) -> None:
    server = PatientTei(4, max_client_batch_size=32)
    async with served(boot, server) as gateway:
        states = [
            replica.state.value for replica in gateway.application.gateway.upstreams["only"].pool.replicas
        ]
        assert_vectors(await embed(gateway, "a"), "a")

    assert ["up"] == states
    assert (4, 0) == (server.refused, server.refusals)


async def test_server_with_one_free_permit_gets_one_text_at_a_time(boot: Boots) -> None:
    server = FakeTei(max_concurrent_requests=8, max_client_batch_size=32)
    # Other clients hold the rest, all the time.
    server.in_flight = 7
    texts = [f"text {i}" for i in range(4)]
    async with served(boot, server) as gateway:
        reply = await embed(gateway, *texts)

    assert_vectors(reply, *texts)
    assert 8 == server.most_in_flight
    assert server.refused


async def test_two_gateways_share_the_permits_of_a_server(boot: Boots) -> None:
    server = FakeTei(max_concurrent_requests=4, max_client_batch_size=32)
    texts = [f"text {i}" for i in range(4)]
    async with served(boot, server) as one, served(boot, server) as other:
        replies = await asyncio.gather(
            *(embed(gateway, *texts) for gateway in (one, other) for _ in range(10))
        )

    for reply in replies:
        assert_vectors(reply, *texts)
    assert server.most_in_flight <= 4


async def test_refused_size_is_split_and_learned(boot: Boots) -> None:
    server = large_texts_tei()
    texts = [text_of(i) for i in range(10)]
    async with served(boot, server) as gateway:
        assert_vectors(await embed(gateway, *texts), *texts)
        refused = server.too_large
        assert_vectors(await embed(gateway, *texts), *texts)
        status = (await gateway.client.get("/admin/status", headers={"host": "localhost"})).json()

    assert refused >= 1
    assert refused == server.too_large
    [replica] = status["replicas"]
    assert TEXT_BYTES < replica["learned_bytes"] <= server.payload_limit


async def test_configured_bytes_prevent_refusals(boot: Boots) -> None:
    server = large_texts_tei()
    texts = [text_of(i) for i in range(10)]
    async with served(boot, server, ", request_bytes: 290000") as gateway:
        assert_vectors(await embed(gateway, *texts), *texts)

    assert (0, [3, 3, 3, 1]) == (server.too_large, sorted(sizes(server), reverse=True))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
async def test_input_that_alone_is_too_large_is_refused_by_its_index(boot: Boots, path: str) -> None:
    server = large_texts_tei()
    texts = [text_of(0), text_of(1), text_of(2, 400_000), text_of(3)]
    field = "inputs" if path == "/embed" else "input"
    # Cut by the gateway, it would not be too large.
    options = {"truncate": False} if path == "/embed" else {}
    async with served(boot, server, model=", truncate: error") as gateway:
        reply = await gateway.post(path, {field: texts, "model": "m"} | options)

    assert (422 if path == "/embed" else 400) == reply.status_code
    assert "input 2: the upstream refuses its 400003 bytes" in reply.text


async def test_refusal_of_a_small_request_is_no_fault_of_the_caller(boot: Boots) -> None:
    server = FakeTei()
    async with served(boot, server) as gateway:
        # The replica has joined: its limit is that of this call and not of its reference texts.
        assert_vectors(await embed(gateway, "a", "b", "c"), "a", "b", "c")
        server.payload_limit = 10
        refused = await embed(gateway, "a", "b", "c")
        server.payload_limit = 10**6
        # On a busy machine the replica may be tried with smaller requests first.
        for _ in range(20):
            assert_vectors(await embed(gateway, "a", "b", "c"), "a", "b", "c")
            if sizes(server)[-1] == 3:
                break

    assert (502, "upstream_failed") == (refused.status_code, refused.json()["error"]["code"])
    # Nothing was learned from it.
    assert 3 == sizes(server)[-1]


async def test_documents_are_split_with_their_query(boot: Boots) -> None:
    server = large_texts_tei(model_type=RERANKER)
    documents = [text_of(i) for i in range(10)]
    async with served(boot, server) as gateway:
        body = {"query": "q" * 50_000, "texts": documents, "model": "m", "raw_scores": True}
        reply = await gateway.post("/rerank", body)

    assert 200 == reply.status_code, reply.text
    assert sorted(entry["index"] for entry in reply.json()) == list(range(10))


@pytest.mark.parametrize(
    ("auto_truncate", "setting", "status"),
    [(False, "", 422), (True, "", 200), (False, ", truncate: right", 200), (True, ", truncate: error", 422)],
)
@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
async def test_server_decides_on_truncation_unless_configured(
    boot: Boots, auto_truncate: bool, setting: str, status: int, path: str
) -> None:
    server = FakeTei(auto_truncate=auto_truncate)
    field = "inputs" if path == "/embed" else "input"
    async with served(boot, server, model=setting) as gateway:
        reply = await gateway.post(path, {field: "word " * 40, "model": "m"})
        told = (await gateway.client.get("/models/m/info")).json()

    assert (400 if path != "/embed" and status == 422 else status) == reply.status_code, reply.text
    assert (status == 200) is told["auto_truncate"]
