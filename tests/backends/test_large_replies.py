"""Replies that would take long to decode are refused before that."""

import tracemalloc
from typing import Any

import httpx
import pytest

from backends.contract import BackendKind, Embed, ReplicaSpec, Work
from backends.errors import BackendError, ReplicaFailed
from backends.http import DESCRIPTION_BYTES_MAX, REPLY_LISTS_MAX, REPLY_VALUES_MAX, UpstreamClient
from tests.conftest import remote_backend
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm

LISTS = b"[" + b"[]," * REPLY_LISTS_MAX + b"[]]"
VALUES = b"[[" + b"0," * (REPLY_VALUES_MAX + 1) + b"0]]"


def client_of(body: bytes, status: int = 200) -> UpstreamClient:
    """Return a client of a server that replies the same to every request."""

    async def reply(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body)

    return UpstreamClient("http://hostile", transport=httpx.MockTransport(reply))


@pytest.mark.parametrize(
    ("body", "reason"), [(LISTS, "lists and objects"), (VALUES, "values")], ids=["lists", "values"]
)
async def test_reply_of_too_many_values_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(ReplicaFailed, match=reason):
        await client_of(body).post("/embed", b"{}", 30.0)


@pytest.mark.parametrize(
    ("kind", "server", "work"),
    [
        ("tei", FakeTei(), Embed(("a",))),
        ("openai", FakeOpenAI(), Embed(("a",))),
        ("vllm", FakeVllm(), Embed(("a",))),
    ],
    ids=["tei", "openai", "vllm"],
)
async def test_reply_is_bounded_by_its_inputs(kind: BackendKind, server: Any, work: Work) -> None:
    joining = httpx.ASGITransport(server)
    has_joined = False

    async def answer(request: httpx.Request) -> httpx.Response:
        if not has_joined or request.method == "GET":
            return await joining.handle_async_request(request)
        return httpx.Response(200, content=b"[[" + b"0," * 200_000 + b"0]]")

    backend = remote_backend(kind, ReplicaSpec("http://hostile"), httpx.MockTransport(answer))
    await backend.describe(30.0)
    has_joined = True

    with pytest.raises(ReplicaFailed, match="more than 131072 values"):
        await backend.run(work, 30.0)


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

    with pytest.raises(ReplicaFailed, match="bytes for each input"):
        await backend.run(Embed(("long",)), 30.0)


async def test_large_honest_reply_is_taken() -> None:
    body = b"[" + b",".join([b"[" + b",".join([b"0.123"] * 1024) + b"]"] * 2048) + b"]"
    response = await client_of(body).post("/embed", b"{}", 30.0)

    # A difference would be printed in full.
    assert hash(body) == hash(response.body)


@pytest.mark.parametrize("kind", ["tei", "vllm", "infinity", "openai"])
async def test_huge_description_is_refused_undecoded(kind: BackendKind) -> None:
    async def describe(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b'{"a":[' + b"{}," * DESCRIPTION_BYTES_MAX + b"{}]}")

    backend = remote_backend(kind, ReplicaSpec("http://hostile"), httpx.MockTransport(describe))
    tracemalloc.start()
    with pytest.raises(BackendError):
        await backend.describe(30.0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # Decoded it would take 64 bytes for each of four million objects.
    assert peak_bytes < 20 * DESCRIPTION_BYTES_MAX


@pytest.mark.parametrize("kind", ["tei", "vllm", "infinity", "openai"])
async def test_huge_error_is_cut(kind: BackendKind) -> None:
    async def fail(_: httpx.Request) -> httpx.Response:
        return httpx.Response(500, content=b'{"error":[' + b"[]," * 1_000_000 + b"[]]}")

    backend = remote_backend(kind, ReplicaSpec("http://hostile"), httpx.MockTransport(fail))
    tracemalloc.start()
    with pytest.raises(BackendError):
        await backend.run(Embed(("a",)), 30.0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 20_000_000
