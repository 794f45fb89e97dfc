"""Bounds of a connection: timeouts for slow and silent clients, and the size of a head."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import uvicorn

from gateway.api.server import in_flight
from gateway.api.server.connection_limit import ConnectionLimit, connections_within_files
from gateway.api.server.http_protocol import CONNECTION, BodyPace, BoundedProtocol, LingeringClose
from gateway.api.server.in_flight import InFlight
from tests.fakes.hooks import until
from tests.waiting import PATIENCE_S

# Path → bytes of its reply. /large exceeds every buffer between two sockets; /small never pauses writing.
SIZES = {"/large": 30_000_000, "/small": 60_000}
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class ImpatientProtocol(BoundedProtocol):
    """Protocol with short timeouts.

    ended: set when the connection is lost. read_timeouts: number of expired timers of heads and bodies.
    parsed: number of requests whose head was parsed.
    """

    head_timeout_s = 0.2
    body_timeout_s = 0.2
    write_timeout_s = 0.2
    ended: asyncio.Event
    read_timeouts = 0
    parsed = 0
    # Accepted connections, in order; each test has its own queue.
    accepted: ClassVar[asyncio.Queue["ImpatientProtocol"]]
    # Lets calls to /slow continue.
    released: ClassVar[asyncio.Event]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.ended = asyncio.Event()
        type(self).accepted.put_nowait(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.parsed += 1

    def _on_read_timeout(self) -> None:
        super()._on_read_timeout()
        self.read_timeouts += 1


async def sized_reply(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, then send a reply of the size of its path."""
    while (await receive()).get("more_body"):
        pass
    size = SIZES.get(scope["path"], 2)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * size})


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(kernel_bytes: int = 0, application: Any = sized_reply) -> AsyncIterator[Connection]:
    ImpatientProtocol.accepted = asyncio.Queue()
    config = uvicorn.Config(application, port=0, http=ImpatientProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    if kernel_bytes:
        # Send buffer of the kernel, which accepted connections inherit.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_bytes)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def exchange(*pieces: bytes) -> bytes:
    """Send some pieces and return everything that the server sends until it closes the connection."""
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


@pytest.mark.parametrize(
    "request_",
    [
        b"POST",
        HEAD,
        HEAD + b"content-length: 5\r\n\r\n",
        HEAD + b"content-length: 5\r\n\r\nab",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
async def test_an_incomplete_request_is_refused_with_408(request_: bytes) -> None:
    reply = await exchange(request_)

    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in reply


async def test_a_silent_connection_is_closed() -> None:
    assert b"" == await exchange()


async def test_a_large_head_is_refused_before_it_ends() -> None:
    lines = [b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100)]

    assert (await exchange(HEAD, *lines)).startswith(b"HTTP/1.1 431 ")


async def test_a_large_body_does_not_count_as_head() -> None:
    body = b"z" * 500_000
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)

    assert (await exchange(head + body)).startswith(b"HTTP/1.1 200 ")


async def test_sequential_requests_on_one_connection_are_answered() -> None:
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            writer.write(HEAD + b"content-length: 2\r\n\r\nab")
            await reader.readuntil(b"xx")


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        protocol = await ImpatientProtocol.accepted.get()
        await protocol.ended.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(30_000_000)


async def test_100_continue_is_sent_before_the_body() -> None:
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == await reader.readuntil(b"\r\n\r\n")
        writer.write(b"ab")
        assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200 ")


async def test_malformed_http_is_refused_with_json() -> None:
    reply = await exchange(b"NONSENSE\r\n\r\n")

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in reply


@asynccontextmanager
async def slow_client(
    path: str, kernel_bytes: int = 0
) -> AsyncIterator[tuple[socket.socket, ImpatientProtocol]]:
    """Connect a client with a small receive buffer that has sent a request; the test reads the reply."""
    async with connected(kernel_bytes) as (_, writer), asyncio.timeout(PATIENCE_S):
        await ImpatientProtocol.accepted.get()
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, writer.get_extra_info("peername"))
            await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            yield client, await ImpatientProtocol.accepted.get()


async def test_a_slow_client_gets_its_whole_reply() -> None:
    loop = asyncio.get_running_loop()
    started_s, received_bytes = loop.time(), 0
    async with slow_client("/large") as (client, _):
        while received_bytes < SIZES["/large"]:
            piece = await loop.sock_recv(client, 300_000)
            assert piece
            received_bytes += len(piece)
            # 20 MB/s: the whole reply takes longer than the timeout of a stalled reply.
            await asyncio.sleep(max(0.0, started_s + received_bytes / 20_000_000 - loop.time()))

    assert loop.time() - started_s > ImpatientProtocol.write_timeout_s


@pytest.mark.parametrize(("path", "kernel_bytes"), [("/large", 0), ("/small", 4096)])
async def test_a_client_that_stops_reading_is_disconnected(path: str, kernel_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    received_bytes = 0
    async with slow_client(path, kernel_bytes) as (client, protocol):
        await loop.sock_recv(client, 1000)
        await protocol.ended.wait()
        # The bytes in the kernel's buffers still arrive, followed by the end of the stream.
        while piece := await loop.sock_recv(client, 1_000_000):
            received_bytes += len(piece)

    assert received_bytes < SIZES[path] - 1000


async def direct_reply(scope: Any, receive: Any, send: Any) -> None:
    """Answer through the connection handle if possible; the body reports whether it was."""
    while (await receive()).get("more_body"):
        pass
    connection = scope["extensions"][CONNECTION]
    body, value = b"whole", scope["query_string"].replace(b"%0A", b"\n")
    headers = [(b"content-length", b"5"), (b"x-query", value)]
    if connection.answer(200, headers, body):
        return
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"parts"})


@pytest.mark.parametrize(
    ("request_", "body", "closed"),
    [
        pytest.param(b"POST /?a HTTP/1.1\r\nhost: x\r\n\r\n", b"whole", False, id="kept-alive"),
        pytest.param(b"POST /?a HTTP/1.1\r\nconnection: close\r\n\r\n", b"parts", True, id="closing"),
        pytest.param(b"POST /?a HTTP/1.0\r\n\r\n", b"parts", True, id="1.0"),
    ],
)
async def test_a_reply_is_sent_at_once_on_a_persistent_connection(
    request_: bytes, body: bytes, closed: bool
) -> None:
    async with connected(application=direct_reply) as (reader, writer):
        writer.write(request_)
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(5) == body
        assert b"date: " in head
        assert (b"connection: close" in head) is closed
        if closed:
            assert await reader.read() == b""


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async with connected(application=direct_reply) as (reader, writer):
        writer.write(b"POST /?a%0Ab:c HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.read() == b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected(application=direct_reply) as (reader, writer):
        requests = [b"POST /?%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5)]
        writer.write(b"".join(requests))
        for number in range(5):
            assert b"x-query: %d\r\n" % number in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"whole"


@pytest.mark.parametrize("body_bytes", [0, 100_000])
async def test_reports_a_lost_connection_to_a_waiting_call(body_bytes: int) -> None:
    started, body_read, lost, ended = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    finished: list[str] = []

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        while (await receive())["more_body"]:
            pass
        scope["extensions"][CONNECTION].watch(lost.set)
        body_read.set()
        await lost.wait()
        finished.append(scope["path"])
        ended.set()

    async with connected(application=waiting) as (_, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % body_bytes)
        await started.wait()
        writer.write(b"x" * body_bytes)
        await body_read.wait()
        assert not lost.is_set()
        writer.transport.abort()
        await ended.wait()

    assert finished == ["/"]


async def test_does_not_report_a_lost_connection_to_an_answered_call() -> None:
    reported: list[str] = []

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        connection = scope["extensions"][CONNECTION]
        connection.watch(lambda: reported.append(scope["path"]))
        assert connection.answer(200, [(b"content-length", b"0")], b"")

    async with connected(application=answering) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"POST /path HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        protocol = await ImpatientProtocol.accepted.get()
        writer.transport.abort()
        await protocol.ended.wait()

    assert reported == []


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Reply with path and body. /slow waits until the test releases it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["path"] == "/slow":
        await ImpatientProtocol.released.wait()
    reply = scope["path"].encode() + b"=" + body
    headers = [(b"content-length", b"%d" % len(reply))]
    if not scope["extensions"][CONNECTION].answer(200, headers, reply):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})


async def read_replies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Read `count` replies and return the status and body of each."""
    replies = []
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.findall(rb"content-length: (\d+)", head)[0])
        replies.append(head.split(b" ")[1] + b" " + await reader.readexactly(size))
    return replies


H2C = b"connection: Upgrade, HTTP2-Settings, x-a\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
NESTED_REQUEST = b"GET /admin HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("offer", [H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"])
async def test_protocol_upgrades_are_answered_in_http_1(offer: bytes, pieces: int) -> None:
    request = b"POST /a HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        offer,
        len(NESTED_REQUEST),
        NESTED_REQUEST,
    )
    both = request + b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nb"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        size = -(-len(both) // pieces)
        for start in range(0, len(both), size):
            writer.write(both[start : start + size])
            await writer.drain()
            await asyncio.sleep(0.01)
        # A body that looks like a request is not parsed as one.
        assert [b"200 /a=" + NESTED_REQUEST, b"200 /b=b"] == await read_replies(reader, 2)


async def test_many_upgrade_requests_in_one_packet_are_answered() -> None:
    request = b"POST /%d HTTP/1.1\r\nupgrade: x\r\nconnection: upgrade\r\ncontent-length: 1\r\n\r\nz"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"".join(request % number for number in range(600)))
        assert [b"200 /%d=z" % number for number in range(600)] == await read_replies(reader, 600)


async def test_connect_is_refused() -> None:
    assert b" 400 " in await exchange(b"CONNECT admin:80 HTTP/1.1\r\nhost: x\r\n\r\n")


async def test_reading_pauses_while_pipelined_requests_wait() -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        request = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n" + b"x" * 4000
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        sending = asyncio.create_task(_send(writer, [request % number for number in range(5000)]))
        protocol = await ImpatientProtocol.accepted.get()
        await until(lambda: protocol.flow.read_paused)
        # No event reports that the server reads nothing more: give it time to do so by mistake.
        await asyncio.sleep(0.3)
        assert protocol.flow.read_paused
        # The kernel's buffers are full, and the server has read only a small part of the 20 MB.
        assert not sending.done()
        assert len(protocol._rest) < 1_000_000
        ImpatientProtocol.released.set()
        replies = await read_replies(reader, 5001)
        assert [b"200 /slow=", *(b"200 /%d=" % number + b"x" * 4000 for number in range(5000))] == replies
        await sending


async def test_one_of_many_requests_in_one_packet_is_parsed_at_a_time() -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        request = b"GET /slow HTTP/1.1\r\n\r\n"
        writer.write(request * 2000)
        protocol = await ImpatientProtocol.accepted.get()
        await until(lambda: protocol.flow.read_paused)
        assert (1, 1999 * len(request)) == (protocol.parsed, len(protocol._rest))
        assert 1999 * len(request) == protocol.in_flight.bytes
        ImpatientProtocol.released.set()
        assert [b"200 /slow="] * 2000 == await read_replies(reader, 2000)
        assert (2000, 0) == (protocol.parsed, len(protocol._rest))
        assert 0 == protocol.in_flight.bytes
        # It reads on.
        assert not protocol.flow.read_paused


@pytest.mark.usefixtures("patient")
async def test_requests_of_a_client_that_does_not_read_stay_unparsed() -> None:
    async with connected(kernel_bytes=4096) as (reader, writer), asyncio.timeout(PATIENCE_S):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /small HTTP/1.1\r\n\r\n" * 10_000)
        protocol = await ImpatientProtocol.accepted.get()
        await until(lambda: protocol.flow.write_paused)
        await asyncio.sleep(0)
        assert protocol.flow.read_paused
        assert protocol.parsed < 200
        assert len(protocol._rest) <= 256 * 1024


async def test_kept_requests_of_lost_connections_are_counted_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # An eighth is for those that make no progress.
    monkeypatch.setattr(ImpatientProtocol, "in_flight", InFlight(8 * 40_000))
    monkeypatch.setattr(in_flight, "GRACE_S", 0.001)
    async with connected(application=echo) as (_, first), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        opened = [await asyncio.open_connection(*first.get_extra_info("peername")[:2]) for _ in range(4)]
        protocols = [await ImpatientProtocol.accepted.get() for _ in range(5)][1:]
        for (_, writer), protocol in zip(opened, protocols, strict=True):
            writer.write(b"GET /slow HTTP/1.1\r\n\r\n" + b"GET /a HTTP/1.1\r\n\r\n" * 1000)
            await until(lambda protocol=protocol: bool(protocol._rest) or protocol.is_closing())
            # The server's clock has a resolution of one millisecond.
            await asyncio.sleep(0.01)
        # The fourth exceeds the bound: one of the three that came before it makes room.
        await until(
            lambda: [True] == [protocol.is_closing() for protocol in protocols if protocol.is_closing()]
        )
        assert 3 * 19_000 == ImpatientProtocol.in_flight.bytes
        for _, writer in opened:
            writer.transport.abort()
        # A loss is noticed when more is read.
        ImpatientProtocol.released.set()
        for protocol in protocols:
            await protocol.ended.wait()
        assert 0 == ImpatientProtocol.in_flight.bytes


MIXED = (
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
    # A body that looks like requests, and an empty line before the next head.
    b"POST /b HTTP/1.1\r\nContent-Length: 29\r\n\r\nGET /no HTTP/1.1\r\n\r\n\r\nGET /no\r\n"
    b"DELETE /c HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
    b"POST /d HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    b"6\r\n\r\n\r\nde\r\n2;e=1\r\n\r\n\r\n0\r\nx: content-length: 3\r\nx-length: 3\r\n\r\n"
    b"POST /e HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    b"PUT /f HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\ncontent-length: 5\r\n\r\n\r\n\r\nf"
    b"GET /g HTTP/1.1\r\n\r\n"
)
MIXED_REPLIES = [
    b"200 /a=",
    b"200 /b=GET /no HTTP/1.1\r\n\r\n\r\nGET /no",
    b"200 /c=",
    b"200 /d=\r\n\r\nde\r\n",
    b"200 /e=",
    b"200 /f=\r\n\r\nf",
    b"200 /g=",
]


@pytest.mark.usefixtures("patient")
async def test_requests_are_told_apart_wherever_they_are_cut() -> None:
    async with connected(application=echo) as (reader, _), asyncio.timeout(PATIENCE_S):
        protocol = await ImpatientProtocol.accepted.get()
        for cut in range(len(MIXED)):
            protocol.data_received(MIXED[:cut])
            if cut % 2:
                # The first requests are answered, or the rest comes before they are.
                await until(lambda: protocol._handle is None or not protocol._in_head)
            protocol.data_received(MIXED[cut:])
            assert MIXED_REPLIES == await read_replies(reader, len(MIXED_REPLIES))


@pytest.mark.usefixtures("patient")
async def test_requests_that_come_byte_by_byte_are_told_apart() -> None:
    async with connected(application=echo) as (reader, _), asyncio.timeout(PATIENCE_S):
        protocol = await ImpatientProtocol.accepted.get()
        for byte in MIXED:
            await until(lambda: not protocol._rest)
            protocol.data_received(bytes([byte]))
        assert MIXED_REPLIES == await read_replies(reader, len(MIXED_REPLIES))


@pytest.mark.parametrize("before", [b"", b"GET /a HTTP/1.1\r\n\r\n"])
async def test_blank_lines_without_a_head_are_refused_at_the_bound_of_a_head(before: bytes) -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(before + b"\r\n" * 100_000)
        if before:
            assert [b"200 /a="] == await read_replies(reader, 1)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_a_kept_request_is_answered_after_the_end_of_the_time_for_a_head() -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        writer.write(b"GET /slow HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nGET /c HT")
        await asyncio.sleep(2 * ImpatientProtocol.head_timeout_s)
        ImpatientProtocol.released.set()
        assert [b"200 /slow=", b"200 /b="] == await read_replies(reader, 2)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def _send(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()


@pytest.mark.parametrize(
    ("malformed", "status"),
    [
        pytest.param(b"BROKEN / GARBAGE\r\n\r\n", b"400", id="no-http"),
        pytest.param(b"POST /half", b"408", id="half-a-head"),
        pytest.param(b"POST /half HTTP/1.1\r\ncontent-length: 9\r\n\r\nab", b"408", id="half-a-body"),
        pytest.param(b"GET /long HTTP/1.1\r\nx: " + b"a" * 200_000, b"431", id="endless-head"),
    ],
)
async def test_complete_requests_are_answered_before_a_malformed_one_is_refused(
    malformed: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyPace, "check_s", 0.2)
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok" + malformed)
        protocol = await ImpatientProtocol.accepted.get()
        await until(lambda: bytes(protocol._rest[:10]) == malformed[:10])
        ImpatientProtocol.released.set()
        assert [b"200 /slow=ok"] == await read_replies(reader, 1)
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)


async def test_many_small_requests_do_not_count_as_a_large_head() -> None:
    request = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        sending = asyncio.create_task(_send(writer, [b"".join(request % number for number in range(4000))]))
        assert [b"200 /%d=" % number for number in range(4000)] == await read_replies(reader, 4000)
        await sending


async def test_a_client_that_abandons_requests_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(application=echo) as (_, writer), asyncio.timeout(PATIENCE_S):
        ImpatientProtocol.released = asyncio.Event()
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" * 3)
        protocol = await ImpatientProtocol.accepted.get()
        await until(lambda: len(protocol._rest) > 0)
        writer.transport.abort()
        await writer.wait_closed()
        ImpatientProtocol.released.set()
        await protocol.ended.wait()
    # The server has stopped, and with it every call.
    assert "Exception" not in caplog.text


CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
FLOOD_BYTES = 3_000_000


async def echo_headers(scope: Any, receive: Any, send: Any) -> None:
    """Reply with the headers of the request, after its body. /early replies before the body."""
    while scope["path"] != "/early" and (await receive()).get("more_body"):
        pass
    reply = b"\n".join(b"%b=%b" % header for header in scope["headers"])
    headers = [(b"content-length", b"%d" % len(reply))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


@pytest.mark.parametrize("name", [b"authorization", b"x-forwarded-for", b"expect"])
async def test_trailers_are_no_headers(name: bytes) -> None:
    request = CHUNKED + b"x-real: 1\r\n\r\n2\r\nab\r\n0\r\n%b: 7\r\n\r\n" % name
    async with connected(application=echo_headers) as (reader, writer), asyncio.timeout(PATIENCE_S):
        # In one packet, all of it is parsed before the application reads the headers.
        writer.write(request * 2)
        expected = b"200 host=x\ntransfer-encoding=chunked\nx-real=1"
        assert [expected, expected] == await read_replies(reader, 2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients of a busy machine time for their bodies."""
    monkeypatch.setattr(ImpatientProtocol, "head_timeout_s", 60)
    monkeypatch.setattr(ImpatientProtocol, "body_timeout_s", 60)


async def flood(start: bytes, piece: bytes) -> tuple[int, bytes]:
    """Send `start`, then `piece` for ever; return the number of bytes that were taken, and the reply."""
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(start)
        protocol = await ImpatientProtocol.accepted.get()
        sent_bytes = 0
        pieces = piece * (16_000 // len(piece))
        with contextlib.suppress(ConnectionError):
            while not protocol.is_closing() and sent_bytes < FLOOD_BYTES:
                writer.write(pieces)
                await writer.drain()
                sent_bytes += len(pieces)
                # Let the server take what was sent.
                await asyncio.sleep(0)
        reply = await reader.read() if protocol.is_closing() else b""
        return sent_bytes, reply


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(b"0\r\n", b"a:b\r\n", id="trailers"),
        pytest.param(b"0\r\nx: ", b"a", id="one-endless-trailer"),
        pytest.param(b"", b"1;" + b"e" * 500 + b"\r\nx\r\n", id="chunk-extensions"),
        pytest.param(b"1;", b"e" * 500, id="one-endless-extension"),
        pytest.param(b"", b"1\r\nx\r\n", id="one-byte-chunks"),
    ],
)
@pytest.mark.usefixtures("patient")
async def test_framing_of_a_body_is_bounded(start: bytes, piece: bytes) -> None:
    sent_bytes, reply = await flood(CHUNKED + b"\r\n" + start, piece)

    assert reply.startswith(b"HTTP/1.1 431 ")
    assert b"framing_too_large" in reply
    assert sent_bytes < FLOOD_BYTES


@pytest.mark.usefixtures("patient")
async def test_a_body_of_small_chunks_is_taken() -> None:
    body = b"8\r\nabcdefgh\r\n" * 100_000 + b"0\r\n\r\n"
    async with connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(CHUNKED + b"\r\n" + body)
        assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("end", [b"\r\n", b""])
async def test_a_head_of_many_lines_is_refused(end: bytes) -> None:
    reply = await exchange(HEAD + b"a:b\r\n" * (BoundedProtocol.head_lines_max + 1) + end)

    assert reply.startswith(b"HTTP/1.1 431 ")


EARLY = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"


async def test_an_early_reply_says_that_the_connection_closes_and_closes_it() -> None:
    async with connected(application=echo_headers) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(EARLY + b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in reply
        # Bytes of the body are not parsed as a request.
        assert 1 == reply.count(b"HTTP/1.1")


async def test_a_client_that_sends_its_whole_body_first_gets_an_early_reply() -> None:
    async with connected(application=echo_headers) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(EARLY)
        protocol = await ImpatientProtocol.accepted.get()
        await until(protocol.is_closing)
        for _ in range(100):
            writer.write(b"x" * 10_000)
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await protocol.ended.wait()


@pytest.mark.parametrize(
    ("bound", "value", "pieces"),
    [pytest.param("bytes_max", 100_000, 100, id="sends"), pytest.param("timeout_s", 0.2, 0, id="waits")],
)
async def test_a_client_that_stays_after_an_early_reply_is_disconnected(
    bound: str, value: float, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LingeringClose, bound, value)
    async with connected(application=echo_headers) as (_, writer), asyncio.timeout(PATIENCE_S):
        writer.write(EARLY)
        protocol = await ImpatientProtocol.accepted.get()
        await until(protocol.is_closing)
        with contextlib.suppress(ConnectionError):
            for _ in range(pieces):
                writer.write(b"x" * 10_000)
                await writer.drain()
        await protocol.ended.wait()


@pytest.mark.usefixtures("patient")
async def test_a_connection_persists_after_a_reply_to_a_whole_body() -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(PATIENCE_S):
        protocol = await ImpatientProtocol.accepted.get()
        for _ in range(2):
            writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
            # The server waits for the body before the rest of it comes.
            await until(lambda: not protocol._in_head)
            writer.write(b"ok")
            assert [b"200 /a=ok"] == await read_replies(reader, 1)


async def test_a_refused_body_ends_the_call_that_waits_for_it() -> None:
    ended = asyncio.Event()

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        del scope, send
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async with connected(application=reading) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(CHUNKED + b"\r\nnonsense\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 400 ")
        await ended.wait()


async def test_a_call_writes_no_reply_to_a_connection_that_was_refused() -> None:
    answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        try:
            answered.set_result(scope["extensions"][CONNECTION].answer(401, [(b"content-length", b"0")], b""))
        except Exception as error:  # noqa: BLE001 - the test shows it
            answered.set_exception(error)

    # Both arrive in one piece, so that the body is refused before the call begins.
    async with connected(application=answering) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(CHUNKED + b"\r\nnonsense\r\n")
        assert await answered
        reply = await reader.read()

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert 1 == reply.count(b"HTTP/1.1 ")


HALF_HEAD = b"GET / HTTP/1.1\r\nhost"
WHOLE = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def limited(connections_max: int) -> AsyncIterator[Callable[[bytes], Awaitable[Connection]]]:
    """Serve `echo` with a bound on connections; yield a function that connects and sends bytes."""
    async with connected(application=echo) as (_, first), asyncio.timeout(PATIENCE_S):
        await ImpatientProtocol.accepted.get()
        ImpatientProtocol.released = asyncio.Event()
        ImpatientProtocol.limit = ConnectionLimit(connections_max, new_max=0)
        address = first.get_extra_info("peername")
        writers: list[asyncio.StreamWriter] = []

        async def connect(sent: bytes) -> Connection:
            reader, writer = await asyncio.open_connection(*address[:2])
            writers.append(writer)
            writer.write(sent)
            await writer.drain()
            protocol = await ImpatientProtocol.accepted.get()
            await until(lambda: protocol.headers is not None or protocol.transport.is_closing())
            return reader, writer

        try:
            yield connect
        finally:
            ImpatientProtocol.released.set()
            del ImpatientProtocol.limit
            for writer in writers:
                writer.close()


@pytest.mark.usefixtures("patient")
async def test_half_heads_make_room_for_new_connections() -> None:
    async with limited(4) as connect:
        halves = [await connect(HALF_HEAD) for _ in range(6)]
        reader, _ = await connect(WHOLE)
        assert [b"200 /a="] == await read_replies(reader, 1)
        # The first connection, which has sent nothing, made room before them.
        assert [b""] * 3 == [await reader.read() for reader, _ in halves[:3]]


async def test_idle_connections_make_room_and_requests_in_progress_do_not() -> None:
    async with limited(3) as connect:
        slow = [(await connect(b"POST /slow HTTP/1.1\r\ncontent-length: 0\r\n\r\n"))[0] for _ in range(2)]
        idle, _ = await connect(WHOLE)
        assert [b"200 /a="] == await read_replies(idle, 1)
        third, _ = await connect(b"POST /slow HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        assert b"" == await idle.read()
        refused, _ = await connect(WHOLE)
        reply = await refused.read()
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in reply
        assert b"gateway_full" in reply
        ImpatientProtocol.released.set()
        assert [[b"200 /slow="]] * 3 == [await read_replies(reader, 1) for reader in (*slow, third)]


@pytest.mark.usefixtures("patient")
async def test_owed_bodies_make_room() -> None:
    async with limited(2) as connect:
        owing = [(await connect(b"POST /a HTTP/1.1\r\ncontent-length: 2\r\n\r\n"))[0] for _ in range(2)]
        reader, _ = await connect(WHOLE)
        assert [b"200 /a="] == await read_replies(reader, 1)
        assert (await owing[0].read()).startswith(b"HTTP/1.1 408 ")


def test_connections_fit_into_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(200, 400), (200, 400)]
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits.pop())
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: set_to.append(pair))

    assert [200, 100] == [connections_within_files(4096), connections_within_files(100)]
    assert [(400, 400)] == set_to
