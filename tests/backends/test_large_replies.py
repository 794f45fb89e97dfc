"""Replies that would take long to decode are refused before that."""

import asyncio
import tracemalloc
from typing import Any

import httpx
import pytest

from backends.contract import BackendKind, Embed, ReplicaSpec
from backends.contract.errors import BackendError, ConnectionLost, ReplicaFailed
from backends.http.client import (
    DESCRIPTION_BYTES_MAX,
    REPLY_LISTS_MAX,
    REPLY_VALUES_MAX,
    ROW_BYTES_MAX,
    UpstreamClient,
    reply_bytes_max,
)
from tests.backends.adapters import SERVERS
from tests.conftest import remote_backend
from tests.fakes.http_servers import HEAD, listening
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import DIMENSIONS

LISTS = b"[" + b"[]," * REPLY_LISTS_MAX + b"[]]"
VALUES = b"[[" + b"0," * (REPLY_VALUES_MAX + 1) + b"0]]"


def client_of(body: bytes, status: int = 200) -> UpstreamClient:
    """Return a client of a server that replies the same to every request."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    return UpstreamClient("http://hostile", transport=transport)


@pytest.mark.parametrize(
    ("body", "reason"), [(LISTS, "lists and objects"), (VALUES, "values")], ids=["lists", "values"]
)
async def test_reply_of_too_many_values_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(ReplicaFailed, match=reason):
        await client_of(body).post("/embed", b"{}", 30.0)


@pytest.mark.parametrize("kind", ["tei", "openai", "vllm"])
async def test_reply_is_bounded_by_its_inputs(kind: BackendKind) -> None:
    joining = httpx.ASGITransport(SERVERS[kind]())
    has_joined = False

    async def answer(request: httpx.Request) -> httpx.Response:
        if not has_joined or request.method == "GET":
            return await joining.handle_async_request(request)
        return httpx.Response(200, content=b"[[" + b"0," * 200_000 + b"0]]")

    backend = remote_backend(kind, ReplicaSpec("http://hostile"), httpx.MockTransport(answer))
    await backend.describe(30.0)
    has_joined = True

    with pytest.raises(ReplicaFailed, match="more than 131072 values"):
        await backend.run(Embed(("a",)), 30.0)


async def test_one_long_string_is_no_vector() -> None:
    """Base64 has neither brackets nor commas to count."""
    server = FakeOpenAI()
    joining = httpx.ASGITransport(server)
    item = b'{"data":[{"index":0,"embedding":"' + b"A" * 6_000_000 + b'"}]}'

    async def answer(request: httpx.Request) -> httpx.Response:
        if b"long" in await request.aread():
            return httpx.Response(200, content=item)
        return await joining.handle_async_request(request)

    backend = remote_backend("openai", ReplicaSpec("http://hostile"), httpx.MockTransport(answer))
    await backend.describe(30.0)

    with pytest.raises(ReplicaFailed, match="the reply is too large"):
        await backend.run(Embed(("long",)), 30.0)


async def test_large_honest_reply_is_taken() -> None:
    body = b"[" + b",".join([b"[" + b",".join([b"0.123"] * 1024) + b"]"] * 2048) + b"]"
    response = await client_of(body).post("/embed", b"{}", 30.0)

    # A difference would be printed in full.
    assert hash(body) == hash(response.body)


@pytest.mark.parametrize(
    ("status", "body", "peak_bytes_max"),
    [
        # Decoded it would take 64 bytes for each of four million objects.
        (200, b'{"a":[' + b"{}," * DESCRIPTION_BYTES_MAX + b"{}]}", 20 * DESCRIPTION_BYTES_MAX),
        (500, b'{"error":[' + b"[]," * 1_000_000 + b"[]]}", 20_000_000),
    ],
    ids=["description", "error"],
)
@pytest.mark.parametrize("kind", ["tei", "vllm", "infinity", "openai"])
async def test_huge_body_is_refused_undecoded(
    kind: BackendKind, status: int, body: bytes, peak_bytes_max: int
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    backend = remote_backend(kind, ReplicaSpec("http://hostile"), transport)
    tracemalloc.start()
    with pytest.raises(BackendError):
        await (backend.describe(30.0) if status == 200 else backend.run(Embed(("a",)), 30.0))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < peak_bytes_max


class EndlessReply:
    """Server on a socket that sends a vector without an end. sent: bytes that it has got rid of."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the client closes the connection."""
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        piece = b"0.1," * 16384
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            self.sent += len(piece)


@pytest.mark.parametrize(
    ("rows", "width", "bytes_max"),
    [
        (1, 384, 2**20 + 2 * 384 * 32),
        (32, 1024, 2**20 + 33 * 1024 * 32),
        (1, None, 2**20 + 2 * ROW_BYTES_MAX),
    ],
)
async def test_reply_is_refused_as_soon_as_it_is_larger_than_its_inputs_allow(
    rows: int, width: int | None, bytes_max: int
) -> None:
    server = EndlessReply()
    async with listening(server) as client:
        with pytest.raises(ReplicaFailed, match=f"more than {bytes_max} bytes"):
            await client.post("/embed", b"{}", 30.0, rows=rows, width=width)

    # What is on its way in buffers is not counted exactly.
    assert server.sent < bytes_max + 16 * 2**20


async def test_bound_of_one_reply_does_not_hold_for_the_next_on_its_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in (10, 3 * 2**20):
            if size > 10:
                await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (size, b" " * size))
            await writer.drain()
        await reader.read()

    async with listening(answer) as client:
        await client.post("/embed", b"", 30.0, rows=1, width=8)
        assert 3 * 2**20 == len((await client.post("/embed", b"", 30.0)).body)


@pytest.mark.parametrize("kind", ["tei", "openai", "vllm"])
async def test_adapters_bound_replies_by_the_width_of_their_vectors(kind: BackendKind) -> None:
    backend = remote_backend(kind, ReplicaSpec("http://up"), httpx.ASGITransport(SERVERS[kind]()))
    await backend.describe(30.0)
    await backend.run(Embed(("a",)), 30.0)
    bounds: list[int | None] = []

    async def send(*arguments: Any) -> Any:
        bounds.append(arguments[3])
        raise httpx.ReadError("enough")

    backend._http._transport.send = send  # type: ignore[attr-defined]
    with pytest.raises(ConnectionLost):
        await backend.run(Embed(("a", "b")), 30.0)

    assert [reply_bytes_max(2, DIMENSIONS)] == bounds
