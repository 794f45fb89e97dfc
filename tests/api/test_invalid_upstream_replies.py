"""Invalid upstream replies: callers get a clear error in time, never a wrong vector or a 500."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.invalid_replies import NOT_RANKS, NOT_VECTORS, body_of, ranking
from tests.backends.test_tei_backend import EMBED
from tests.backends.test_tei_backend import NOT_VECTORS as NOT_ROWS
from tests.conftest import Boots, Running, running_gateway
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import RERANKER, respond_with
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei, Hook, is_reference_texts
from tests.fakes.vllm import FakeVllm
from tests.waiting import PATIENCE_S

TWO = ["a", "b"]
KINDS = ["tei", "infinity", "vllm", "openai"]


def server_of(kind: str, *, ranks: bool = False) -> Any:
    """Return a server of an embedding model, or of a cross-encoder."""
    match kind:
        case "infinity":
            return FakeInfinity(capability="rerank") if ranks else FakeInfinity()
        case "vllm":
            return FakeVllm(task="classify") if ranks else FakeVllm()
        case "openai":
            return FakeOpenAI()
    return FakeTei(model_type=RERANKER) if ranks else FakeTei()


def config_of(kind: str, folder: Path, url: str = "http://one", more: str = "") -> str:
    """Return the configuration of one upstream; only Infinity needs the tokenizer."""
    tokenizer = f", tokenizer: {write_small_files(folder)}" if kind == "infinity" else ""
    return f"""
upstreams: {{only: {{backend: {kind}, replicas: ["{url}"]{tokenizer}{more}}}}}
models: {{m: {{upstream: only}}}}
"""


async def ends(gateway: Running, path: str, body: Any) -> tuple[int, str]:
    """Return the status and body of a call that ends in time."""
    async with asyncio.timeout(PATIENCE_S):
        reply = await gateway.post(path, body)
    assert "application/json" == reply.headers["content-type"]
    return reply.status_code, reply.text


@pytest.mark.parametrize("kind", KINDS)
async def test_malformed_reply_never_becomes_vectors(boot: Boots, tmp_path: Path, kind: str) -> None:
    server = server_of(kind)
    async with boot({"one": server}, config_of(kind, tmp_path)) as gateway:
        for name, wrong in NOT_VECTORS.items():
            server.hook = respond_with(200, body_of(wrong))
            status, body = await ends(gateway, "/v1/embeddings", {"model": "m", "input": TWO})
            assert (502, "upstream_failed") == (status, json.loads(body)["error"]["code"]), name
        server.hook = None
        assert 200 == (await ends(gateway, "/v1/embeddings", {"model": "m", "input": TWO}))[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_truncated_reply_never_becomes_vectors(boot: Boots, tmp_path: Path, kind: str) -> None:
    server = server_of(kind)
    whole: list[bytes] = []
    async with boot({"one": server}, config_of(kind, tmp_path)) as gateway:
        await ends(gateway, "/v1/embeddings", {"model": "m", "input": TWO})
        path, sent = server.requests[-1]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://one") as direct:
            whole.append((await direct.post(path, json=sent)).content)
        for length in range(0, len(whole[0]) - 1, 7):
            server.hook = respond_with(200, whole[0][:length])
            status, body = await ends(gateway, "/v1/embeddings", {"model": "m", "input": TWO})
            assert 502 == status, (length, body)


async def test_malformed_rows_of_the_native_tei_route_never_become_vectors(
    boot: Boots, tmp_path: Path
) -> None:
    server = FakeTei()
    async with boot({"one": server}, config_of("tei", tmp_path)) as gateway:
        rows = {name: wrong for name, (path, wrong) in NOT_ROWS.items() if path == EMBED}
        for name, wrong in rows.items():
            server.hook = respond_with(200, body_of(wrong))
            status, body = await ends(gateway, "/embed", {"inputs": TWO, "normalize": False})
            assert (424, "Backend") == (status, json.loads(body)["error_type"]), name


def for_two(reply: bytes) -> Hook:
    """Return a hook with a reply to two texts; single texts, which it might fit, fail."""

    async def hook(_: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        texts = sent.get("texts") or sent.get("documents") or ()
        return (200, reply) if len(texts) == 2 else (500, b"")

    return hook


@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_malformed_reply_never_becomes_scores(boot: Boots, tmp_path: Path, kind: str) -> None:
    server = server_of(kind, ranks=True)
    async with boot({"one": server}, config_of(kind, tmp_path)) as gateway:
        for name, wrong in NOT_RANKS.items():
            server.hook = for_two(body_of(wrong if isinstance(wrong, bytes) else ranking(kind, *wrong)))
            status, body = await ends(gateway, "/rerank", {"query": "q", "texts": TWO})
            assert (424, "Backend") == (status, json.loads(body)["error_type"]), name


GOOD_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
# Bytes that a peer sends, and whether it closes the connection after them.
ON_THE_WIRE: dict[str, tuple[bytes, bool]] = {
    "nothing_and_closed": (b"", True),
    "nothing": (b"", False),
    "no_http": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", True),
    "half_a_head": (b"HTTP/1.1 200 OK\r\ncontent-", True),
    "half_a_body": (GOOD_HEAD + b"content-length: 5000\r\n\r\n[[0.6", True),
    "half_a_body_and_silence": (GOOD_HEAD + b"content-length: 5000\r\n\r\n[[0.6", False),
    "half_a_chunk": (GOOD_HEAD + b"transfer-encoding: chunked\r\n\r\n500\r\n[[0.6", True),
    "no_chunk": (GOOD_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n[[0.6\r\n", True),
    "no_gzip": (GOOD_HEAD + b"content-encoding: gzip\r\ncontent-length: 5\r\n\r\n[[0.6", True),
    "a_length_that_is_none": (GOOD_HEAD + b"content-length: many\r\n\r\n[[0.6]]", True),
    "a_redirect": (b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n", True),
    "endless_head": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, False),
}


@asynccontextmanager
async def speaking(raw_reply: bytes, *, closes: bool) -> AsyncIterator[str]:
    """Serve TEI's description and the reference texts correctly, and send these bytes for everything else."""
    behind = FakeTei()
    held: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        while head := await _head(reader):
            path, length = head
            body = await reader.readexactly(length)
            is_call = bool(body) and not is_reference_texts(next(iter(json.loads(body).values())))
            writer.write(raw_reply if is_call else await _true_answer(behind, path, body))
            await writer.drain()
            if is_call and closes:
                writer.close()
                return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in held:
            writer.close()


async def _true_answer(server: FakeTei, path: str, body: bytes) -> bytes:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://tei") as direct:
        answer = await direct.request("POST" if body else "GET", path, content=body)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer.content), answer.content)


async def _head(reader: asyncio.StreamReader) -> tuple[str, int] | None:
    """Return the path and body length of the next request, or None at the end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
    return head[0].split(" ")[1], sum(lengths)


@pytest.mark.parametrize("name", ON_THE_WIRE)
@pytest.mark.usefixtures("brief_return")
async def test_broken_http_ends_in_an_error_in_time(name: str, tmp_path: Path) -> None:
    raw_reply, closes = ON_THE_WIRE[name]
    async with (
        speaking(raw_reply, closes=closes) as url,
        running_gateway(
            {}, config_of("tei", tmp_path, url, ", attempt_timeout_s: 0.3"), sockets=True
        ) as gateway,
    ):
        status, body = await ends(gateway, "/v1/embeddings", {"model": "m", "input": TWO})

    assert status in {502, 503, 504}, body
    assert json.loads(body)["error"]["code"] in {"upstream_failed", "no_replica", "deadline_exceeded"}
