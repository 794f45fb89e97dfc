"""Tests of the HTTP client and its connection pool; every fault becomes one of four errors."""

import asyncio
import gc
import json
from contextlib import suppress

import httpx
import pytest

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ReplicaFailed,
    ReplicaUnavailable,
)
from backends.http import connection, connection_pool
from backends.http.client import TEMPLATES_MAX, ConnectionOptions, UpstreamClient, countdown
from backends.http.responses import FRAMING_LIMIT_BYTES, HEAD_LIMIT_BYTES, ResponseReader
from tests.backends.test_connect_failures import closed_port
from tests.fakes.http_servers import (
    HEAD,
    OK,
    ScriptedServer,
    ServerBehaviour,
    listening,
    reset,
    send_and_close,
    send_and_wait,
    stall,
    stay_silent,
)


def failing_client(error: Exception) -> UpstreamClient:
    """Return a client whose transport raises this exception for every request."""

    def handle(_: httpx.Request) -> httpx.Response:
        raise error

    return UpstreamClient("http://x", transport=httpx.MockTransport(handle))


async def test_paths_that_come_once_are_not_kept() -> None:
    client = UpstreamClient("http://once.test", transport=httpx.MockTransport(lambda _: httpx.Response(200)))
    for number in range(1000):
        await client.get(f"/status/{number}", 1.0)
    kept = [each for each in gc.get_objects() if isinstance(each, connection_pool.RequestTemplate)]
    assert 0 < sum(each.url.host == "once.test" for each in kept) <= TEMPLATES_MAX


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ConnectError("refused"), ReplicaUnavailable),
        (httpx.ConnectTimeout("slow"), ReplicaUnavailable),
        (httpx.ReadTimeout("slow"), AttemptTimedOut),
        (httpx.WriteTimeout("slow"), AttemptTimedOut),
        (httpx.PoolTimeout("slow"), AttemptTimedOut),
        (TimeoutError(), AttemptTimedOut),
        (httpx.ReadError("reset"), ConnectionLost),
        (httpx.WriteError("reset"), ConnectionLost),
        (httpx.RemoteProtocolError("half"), ConnectionLost),
        (ConnectionResetError(), ConnectionLost),
        (httpx.DecodingError("gzip"), ReplicaFailed),
        (httpx.UnsupportedProtocol("ftp"), BackendError),
        (httpx.InvalidURL("what"), ReplicaFailed),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_translates_httpx_exceptions(error: Exception, expected: type[BackendError]) -> None:
    with pytest.raises(expected) as caught:
        await failing_client(error).post("/embed", b"{}", 1.0)

    assert caught.value.__cause__ is error
    assert str(error) not in caught.value.message or not str(error)


@pytest.mark.parametrize("status", [200, 204, 302, 404, 429, 500, 503])
async def test_every_status_is_a_response(status: int) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=request.content, headers={"x-a": "b", "location": "/other"})

    response = await UpstreamClient("http://x", transport=httpx.MockTransport(handle)).post(
        "/embed", b"body", 1.0
    )

    assert (status, b"body", "b") == (response.status, response.body, response.headers["x-a"])


async def test_sends_paths_below_the_base_url_and_headers() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        received = {
            "url": str(request.url),
            "type": request.headers.get("content-type"),
            "a": request.headers["a"],
        }
        return httpx.Response(200, json=received)

    client = UpstreamClient("http://x:80/prefix/", {"a": "b"}, transport=httpx.MockTransport(handle))
    posted = json.loads((await client.post("/embed", b"{}", 1.0)).body)
    got = json.loads((await client.get("/info", 1.0)).body)

    assert ("http://x/prefix/embed", "application/json", "b") == tuple(posted.values())
    assert ("http://x/prefix/info", None, "b") == tuple(got.values())


async def test_cancellation_is_not_an_upstream_error() -> None:
    started = asyncio.Event()

    async def handle(_: httpx.Request) -> httpx.Response:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    call = asyncio.create_task(
        UpstreamClient("http://x", transport=httpx.MockTransport(handle)).get("/", 30.0)
    )
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CHUNKED_OK = CHUNKED + b"2\r\nok\r\n"
BROKEN: dict[str, tuple[ServerBehaviour, type[BackendError]]] = {
    "dropped_before_the_reply": (send_and_close(), ConnectionLost),
    "reset_before_the_reply": (reset, ConnectionLost),
    "dropped_in_the_status_line": (send_and_close(b"HTTP/1.1 20"), ConnectionLost),
    "dropped_in_the_headers": (send_and_close(HEAD, b"content-type: app"), ConnectionLost),
    "dropped_in_the_body": (send_and_close(HEAD, b"content-length: 100\r\n\r\n", b"[[0.1"), ConnectionLost),
    "dropped_between_chunks": (send_and_close(CHUNKED, b"3\r\n[[0\r\n"), ConnectionLost),
    "dropped_in_the_trailers": (send_and_close(CHUNKED_OK, b"0\r\nx-sum: 1"), ConnectionLost),
    "another_protocol": (send_and_close(b"SSH-2.0-OpenSSH_9.6\r\n"), ReplicaFailed),
    "garbage": (send_and_close(bytes(range(256)) * 4), ReplicaFailed),
    "chunks_of_no_size": (send_and_close(CHUNKED, b"zz\r\n"), ReplicaFailed),
    "length_in_a_trailer": (send_and_close(CHUNKED_OK, b"0\r\ncontent-length: 2\r\n\r\n"), ReplicaFailed),
    "not_gzip": (
        send_and_close(HEAD, b"content-encoding: gzip\r\ncontent-length: 9\r\n\r\n", b"[[0.1]]  "),
        ReplicaFailed,
    ),
    "silent": (stay_silent, AttemptTimedOut),
    "stalled": (stall, AttemptTimedOut),
}


@pytest.mark.parametrize(("speak", "expected"), BROKEN.values(), ids=BROKEN.keys())
async def test_distinguishes_broken_replies_from_unreachable_servers(
    speak: ServerBehaviour, expected: type[BackendError]
) -> None:
    async with listening(speak) as client:
        with pytest.raises(BackendError) as caught:
            await client.post("/embed", b"{}", 0.05 if expected is AttemptTimedOut else 5.0)

    assert expected is type(caught.value)


def lines_of(size: int) -> bytes:
    """Return header lines of at least this many bytes."""
    return b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(size // 1000 + 1))


# Responses that never end. The server then waits for the client to close the connection.
ENDLESS: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "header_lines": ("head", (HEAD, lines_of(HEAD_LIMIT_BYTES + 5000))),
    "whole_head": ("head", (HEAD, lines_of(400_000), b"content-length: 2\r\n\r\nok")),
    "header_line": ("head", (HEAD, b"x-line: ", *[b"y" * 50_000] * 12)),
    "status_line": ("head", (b"HTTP/1.1 200 ", *[b"y" * 50_000] * 12)),
    "trailer_lines": ("trailers", (CHUNKED_OK, b"0\r\n" + lines_of(FRAMING_LIMIT_BYTES + 5000))),
    "trailer_line": ("trailers", (CHUNKED_OK, b"0\r\nx-line: ", *[b"y" * 50_000] * 12)),
    "chunk_extension": ("chunk headers", (CHUNKED_OK, b"2;x=", *[b"y" * 50_000] * 12)),
    "informational": ("informational", (b"HTTP/1.1 100 Continue\r\n\r\n" * 100,)),
}


@pytest.mark.parametrize(("part", "pieces"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_endless_response_is_refused_by_its_bytes(part: str, pieces: tuple[bytes, ...]) -> None:
    async with listening(send_and_wait(*pieces)) as client:
        with pytest.raises(ReplicaFailed, match=part):
            await client.post("/embed", b"{}", 5.0)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a head byte by byte, without an end."""
    writer.write(HEAD + b"x-drip: ")
    while not reader.at_eof():
        writer.write(b"y")
        await writer.drain()
        await asyncio.sleep(0)


async def begin_a_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the first bytes of a head and nothing more."""
    writer.write(b"HTTP/1.")
    await reader.read()


@pytest.mark.parametrize("speak", [drip, begin_a_head])
async def test_slow_head_ends_before_the_request_times_out(
    speak: ServerBehaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    async with listening(speak) as client:
        with pytest.raises(AttemptTimedOut, match="head of the reply was not complete within"):
            await client.post("/embed", b"{}", 5.0)


async def test_informational_response_does_not_start_the_time_for_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.0)

    async def announce(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(OK)

    async with listening(announce) as client:
        assert b"ok" == (await client.get("/", 5.0)).body


async def test_trailers_are_no_headers() -> None:
    trailers = b"content-encoding: gzip\r\nx-compute-tokens: 9\r\nx-sum: 1\r\n"
    head = HEAD + b"x-compute-tokens: 7\r\ntransfer-encoding: chunked\r\n\r\n"
    async with ScriptedServer(head + b"2\r\nok\r\n0\r\n" + trailers + b"\r\n") as server:
        responses = [await server.client.get("/", 5.0) for _ in range(2)]

    assert [{"x-compute-tokens": "7", "transfer-encoding": "chunked"}] * 2 == [r.headers for r in responses]
    assert 1 == len(server.writers)


async def test_head_body_and_trailers_are_bounded_apart() -> None:
    body = b"y" * 300_000
    head = HEAD + lines_of(200_000) + b"transfer-encoding: chunked\r\n\r\n"
    trailers = lines_of(50_000) + b"\r\n"
    async with listening(send_and_close(head, b"%x\r\n" % len(body), body, b"\r\n0\r\n", trailers)) as client:
        response = await client.get("/", 5.0)

    assert (200, body) == (response.status, response.body)


@pytest.mark.parametrize("cause", ["refused connection", "unknown host", "missing socket"])
async def test_server_that_cannot_be_reached_is_unavailable(
    cause: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    socket_path = None
    if cause == "missing socket":
        socket_path = str(tmp_path_factory.mktemp("s") / "none.sock")
    address = f"127.0.0.1:{closed_port()}" if cause == "refused connection" else "nowhere.invalid"
    client = UpstreamClient(f"http://{address}", options=ConnectionOptions(socket_path=socket_path))
    with pytest.raises(ReplicaUnavailable):
        await client.get("/info", 5.0)
    await client.aclose()


async def test_never_sends_cookies_back() -> None:
    requests: list[bytes] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"set-cookie: who=acme; Path=/\r\ncontent-length: 0\r\n\r\n")
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + b"content-length: 0\r\n\r\n")

    async with listening(speak) as client:
        await client.get("/info", 5.0)
        await client.get("/info", 5.0)

    assert requests[0].startswith(b"GET /info")
    assert b"who=acme" not in requests[0]


@pytest.mark.parametrize(("idle_s", "connections"), [(0.0, 2), (60.0, 1)])
async def test_reuses_idle_connections_within_their_lifetime(idle_s: float, connections: int) -> None:
    opened = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await speak(reader, writer)
        writer.close()

    server = await asyncio.start_server(until_closed, "127.0.0.1", 0)
    async with server:
        client = UpstreamClient(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", options=ConnectionOptions(idle_s=idle_s)
        )
        for _ in range(2):
            await client.get("/", 5.0)
        await client.aclose()
        for writer in opened:
            await writer.wait_closed()

    assert connections == len(opened)


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WHOLE: dict[str, tuple[bytes, ...]] = {
    "in_pieces": (HEAD, b"content-length: 2\r\nx-compute-tokens: 7\r\n\r\n", b"o", b"k"),
    "without_a_body": (b"HTTP/1.1 204 No Content\r\n\r\n",),
    "chunked": (HEAD, b"transfer-encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"),
    "chunked_with_trailers": (CHUNKED_OK, b"0\r\nx-sum: 1\r\n", b"x-more: 2\r\n\r\n"),
    "until_closed": (HEAD + b"content-type: a/b\r\n\r\no", b"k"),
    "of_http_1.0": (b"HTTP/1.0 200 OK\r\n\r\nok",),
    "after_another_is_announced": (CONTINUE, CONTINUE + OK),
    "byte_by_byte": tuple(OK[i : i + 1] for i in range(len(OK))),
}


@pytest.mark.parametrize("parts", WHOLE.values(), ids=WHOLE.keys())
async def test_reads_every_framing_of_a_reply(parts: tuple[bytes, ...]) -> None:
    async with listening(send_and_close(*parts)) as client:
        response = await client.get("/", 5.0)

    expected = (204, b"") if b" 204 " in parts[0] else (200, b"ok")
    assert expected == (response.status, response.body)
    assert (b"x-compute-tokens" in b"".join(parts)) is (response.headers.get("x-compute-tokens") == "7")


async def test_late_reply_to_a_cancelled_request_is_not_given_to_the_next() -> None:
    async with ScriptedServer(b"", OK) as server:
        cancelled = asyncio.create_task(server.client.get("/first", 30.0))
        await server.requested.wait()
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        server.writers[0].write(HEAD + b"content-length: 5\r\n\r\nwrong")
        response = await server.client.get("/second", 5.0)

    assert b"ok" == response.body
    assert 2 == len(server.writers)


async def test_reply_arriving_during_cancellation_is_not_unsolicited() -> None:
    async with ScriptedServer(b"", OK) as server:
        cancelled = asyncio.create_task(server.client.get("/first", 30.0))
        await server.requested.wait()
        transport = server.client._transport
        assert isinstance(transport, connection_pool.ConnectionPool)
        [connection] = transport._busy
        cancelled.cancel()
        connection.data_received(OK)
        with suppress(asyncio.CancelledError):
            await cancelled
        for _ in range(3):
            await server.client.get("/", 5.0)

    # One connection for the cancelled request, and one for all others.
    assert 2 == len(server.writers)


@pytest.mark.parametrize(
    "more",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", b"HTTP/1.1 200 OK\r\nx-", b"\x00\xff", b"more"],
)
async def test_unsolicited_data_is_never_a_reply(more: bytes) -> None:
    async with ScriptedServer(OK + more, OK) as server:
        bodies = []
        for _ in range(3):
            with suppress(ConnectionLost):
                bodies.append((await server.client.get("/", 5.0)).body)

    assert {b"ok"} >= set(bodies)
    assert b"ok" == bodies[-1]
    # The next request needs its own connection, because stray data on the first could be taken for its reply.
    assert 2 <= len(server.writers)


async def test_does_not_reuse_a_connection_marked_close() -> None:
    async with ScriptedServer(OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), OK) as server:
        for _ in range(3):
            await server.client.get("/", 5.0)

    assert 2 == len(server.writers)


async def test_concurrent_requests_use_separate_reusable_connections() -> None:
    async with ScriptedServer(OK) as server:
        for _ in range(3):
            await asyncio.gather(*(server.client.post("/", b"", 5.0) for _ in range(5)))

    assert 5 == len(server.writers)


async def test_idle_connection_closed_by_the_server_costs_no_request() -> None:
    async with ScriptedServer(OK) as server:
        await server.client.get("/", 5.0)
        server.writers[0].close()
        await server.writers[0].wait_closed()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        response = await server.client.get("/", 5.0)

    assert b"ok" == response.body


async def test_transfers_large_bodies_completely() -> None:
    sent = bytes(range(256)) * 40_000

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.readexactly(len(sent))
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with listening(speak) as client:
        response = await client.post("/", sent, 20.0)

    assert sent == response.body


@pytest.mark.parametrize("status", [200, 500])
async def test_reply_above_the_limit_of_its_client_fails(status: int) -> None:
    reply = b"HTTP/1.1 %d X\r\ncontent-length: 11\r\n\r\n" % status
    async with listening(send_and_close(reply, b"x" * 11)) as default:
        whole = await default.get("/", 5.0)
        bounded = UpstreamClient(default.base_url, options=ConnectionOptions(reply_bytes_max=10))
        with pytest.raises(ReplicaFailed, match="too large"):
            await bounded.get("/", 5.0)
        await bounded.aclose()

    assert 11 == len(whole.body)


async def test_broken_reply_leaves_no_data_in_memory() -> None:
    """Check without the garbage collector: connection and parser must not hold each other."""
    gc.collect()
    before = sum(type(item) is ResponseReader for item in gc.get_objects())
    gc.disable()
    try:
        for parts in ((HEAD, b"content-length: 100\r\n\r\n", b"[[0.1"), (b"garbage\r\n\r\n",)):
            async with listening(send_and_close(*parts)) as client:
                with suppress(BackendError):
                    await client.post("/embed", b"{}", 5.0)
        await asyncio.sleep(0)
        remaining = [item for item in gc.get_objects() if type(item) is ResponseReader]
        assert [b""] * len(remaining) == [b"".join(reader._chunks) for reader in remaining]
        assert len(remaining) <= before + 1
    finally:
        gc.enable()


async def test_error_body_does_not_contain_the_credential() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(422, text=f"you said {request.headers['authorization']}")

    headers = {"authorization": "Bearer upstream-secret"}
    response = await UpstreamClient("http://x", headers, transport=httpx.MockTransport(handle)).get("/", 1.0)

    assert b"upstream-secret" not in response.body


def test_countdown_is_never_negative() -> None:
    assert 0.0 == countdown(0.0)()
    assert 0 < countdown(60.0)() <= 60
