"""The stub speaks TEI's protocol, as the adapter that reads it confirms over a real socket."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator

import httpx
import msgspec
import numpy as np
import pytest

from backends.contract import Embed, EmbedReply, ReplicaSpec, Rerank, RerankReply, Truncate
from backends.contract.errors import (
    AttemptTimedOut,
    ConnectionLost,
    InvalidWork,
    ReplicaOverloaded,
    ReplicaUnavailable,
)
from backends.tei.adapter import TeiBackend
from backends.tei.replica import open_replica
from loadtest.stub import Stub, StubConnection
from loadtest.stub_protocol import MARK_COMPONENTS, StubSettings, mark_of
from loadtest.timer import Timer

TIMEOUT_S = 5.0
TEXTS = ("one", "another", "ein Gruß")


class RunningStub:
    """A stub in this process, its URL, and the adapters that tests opened."""

    def __init__(self, stub: Stub, url: str) -> None:
        self.stub = stub
        self.url = url
        self.opened: list[TeiBackend] = []

    async def backend(self) -> TeiBackend:
        """Open the adapter and let it read /info."""
        backend = open_replica(ReplicaSpec(self.url))
        self.opened.append(backend)
        await backend.describe(TIMEOUT_S)
        return backend


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[RunningStub]:
    """Run a stub with the settings of the test's parameter."""
    timer = Timer()
    stub = Stub(StubSettings(**getattr(request, "param", {"dimensions": 8})), timer)
    server = await asyncio.get_running_loop().create_server(lambda: StubConnection(stub), "127.0.0.1", 0)
    running = RunningStub(stub, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield running
    for backend in running.opened:
        await backend.aclose()
    for connection in list(stub.connections):
        connection.drop()
    server.close()
    timer.close()


def marks(texts: tuple[str, ...]) -> np.ndarray:
    return np.array([mark_of(text) for text in texts], dtype=np.float32)


@pytest.mark.parametrize("normalize", [True, False], ids=["base64 on /v1/embeddings", "JSON on /embed"])
async def test_adapter_reads_the_vector_of_each_text(served: RunningStub, normalize: bool) -> None:
    backend = await served.backend()

    reply = await backend.run(Embed(TEXTS, normalize=normalize), TIMEOUT_S)

    assert isinstance(reply, EmbedReply)
    assert reply.vectors.shape == (3, 8)
    np.testing.assert_array_equal(reply.vectors[:, :MARK_COMPONENTS], marks(TEXTS))
    assert reply.tokens == 2 + 3 + 4
    await backend.aclose()


async def test_floats_and_base64_hold_the_same_vectors(served: RunningStub) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        floats, packed = [
            (await client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": form})).json()
            for form in ("float", "base64")
        ]

    unpacked = np.frombuffer(b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(np.array(floats["data"][0]["embedding"], dtype=np.float32), unpacked)
    assert floats["usage"] == packed["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


@pytest.mark.parametrize("served", [{"kind": "reranker"}], indirect=True)
async def test_adapter_reads_scores(served: RunningStub) -> None:
    backend = await served.backend()

    reply = await backend.run(Rerank("query", TEXTS), TIMEOUT_S)

    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose(reply.scores, marks(TEXTS)[:, 0], atol=2**-15)
    await backend.aclose()


@pytest.mark.parametrize("served", [{"items": 2}, {"items": 9, "permits": 2}], indirect=True)
async def test_requests_over_a_limit_get_teis_errors(served: RunningStub) -> None:
    backend = await served.backend()
    expected = InvalidWork if served.stub.settings.items == 2 else ReplicaOverloaded

    with pytest.raises(expected):
        await backend.run(Embed(TEXTS), TIMEOUT_S)

    assert served.stub.stats.refused == ({422: 1} if expected is InvalidWork else {429: 1})
    assert served.stub.stats.requests == 0
    await backend.aclose()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"input": 7}', 422),
        (b'{"input": ["a"], "encoding_format": null}', 422),
        (b'{"input": []}', 400),
        (b'{"input": ["a", ""]}', 400),
        (b'{"input": "' + b"a" * 2_000_000 + b'"}', 413),
    ],
    ids=["no JSON", "wrong shape", "null", "no input", "empty input", "too large"],
)
async def test_bad_bodies_get_teis_statuses(served: RunningStub, body: bytes, status: int) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        reply = await client.post("/v1/embeddings", content=body)

    assert reply.status_code == status


@pytest.mark.parametrize("served", [{"base_ms": 49, "input_ms": 1, "parallel": 1}], indirect=True)
async def test_requests_over_the_parallel_limit_wait(served: RunningStub) -> None:
    backend = await served.backend()
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    await asyncio.gather(*(backend.run(Embed((f"text {n}",)), TIMEOUT_S) for n in range(8)))

    # Only the lower bound is certain: eight requests of 50 ms, one after the other.
    assert loop.time() - started_s >= 8 * 0.05
    # On a busy machine the first may end before the last arrives.
    assert served.stub.stats.most_in_flight > 1
    assert served.stub.stats.in_flight == 0
    await backend.aclose()


async def test_control_changes_settings_and_rejects_unknown_ones(served: RunningStub) -> None:
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        changed = await client.post("/control", json={"error_share": 1.0, "error_status": 503})
        failed = await client.post("/embed", json={"inputs": "a"})
        refused = await client.post("/control", json={"speed": 1})
        stats = (await client.get("/stats")).json()

    assert msgspec.json.decode(changed.content, type=StubSettings).error_share == 1.0
    assert (failed.status_code, json.loads(failed.content)["error_type"]) == (503, "Backend")
    assert refused.status_code == 400
    assert stats["refused"] == {"503": 1}


async def test_request_in_pieces_is_joined(served: RunningStub) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"inputs":"a"}'
    request = b"POST /embed HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    for at in range(0, len(request), 9):
        writer.write(request[at : at + 9])
        await writer.drain()
        await asyncio.sleep(0)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)

    assert head.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_truncation_settings_are_accepted(served: RunningStub) -> None:
    backend = await served.backend()

    reply = await backend.run(Embed(("a",), truncate=Truncate.LEFT, dimensions=4), TIMEOUT_S)

    assert isinstance(reply, EmbedReply)
    assert reply.vectors.shape == (1, 4)
    await backend.aclose()


@pytest.mark.parametrize("served", [{"dimensions": 8, "refused_word": "poison"}], indirect=True)
async def test_refused_word_fails_only_its_request(served: RunningStub) -> None:
    backend = await served.backend()

    with pytest.raises(InvalidWork):
        await backend.run(Embed(("good", "a poisoned one")), TIMEOUT_S)
    assert isinstance(await backend.run(Embed(("good",)), TIMEOUT_S), EmbedReply)


@pytest.mark.parametrize(
    "served", [{"dimensions": 8, "crash_word": "poison", "base_ms": 60_000, "down_ms": 60_000}], indirect=True
)
async def test_crash_word_breaks_all_connections(served: RunningStub) -> None:
    backend = await served.backend()
    other = asyncio.create_task(backend.run(Embed(("good",)), TIMEOUT_S))
    async with asyncio.timeout(TIMEOUT_S):
        while served.stub.stats.in_flight == 0:  # noqa: ASYNC110 - the stub sends no event
            await asyncio.sleep(0.01)

    for text in ("poison", "good"):
        with pytest.raises((ConnectionLost, ReplicaUnavailable)):
            await backend.run(Embed((text,)), TIMEOUT_S)
    with pytest.raises(ConnectionLost):
        await other


@pytest.mark.parametrize("served", [{"dimensions": 8, "hang_word": "slow"}], indirect=True)
async def test_hang_word_gets_no_reply(served: RunningStub) -> None:
    backend = await served.backend()

    with pytest.raises(AttemptTimedOut):
        await backend.run(Embed(("a slow one",)), 0.1)
    assert isinstance(await backend.run(Embed(("another",)), TIMEOUT_S), EmbedReply)
