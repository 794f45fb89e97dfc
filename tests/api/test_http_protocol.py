"""Bounds of connections: slow and silent clients are disconnected, and heads have a size."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import uvicorn

from gateway.api.server.http_protocol import CONNECTION, BoundedProtocol

# More than any buffer between two sockets holds; and so little that a server's writing is never paused.
SIZES = {"/large": 30_000_000, "/small": 60_000}
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class ImpatientProtocol(BoundedProtocol):
    """The protocol with timeouts that a test can wait for."""

    head_timeout_s = 0.2
    body_timeout_s = 0.2
    write_timeout_s = 0.2
    ended: asyncio.Event
    released: asyncio.Event
    there: ClassVar[list["ImpatientProtocol"]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        type(self).there = [self]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        type(self).ended.set()


async def large_answer(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, then answer with more than any buffer between two sockets holds."""
    while (await receive()).get("more_body"):
        pass
    size = SIZES.get(scope["path"], 2)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * size})


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(kernel_bytes: int = 0, application: Any = large_answer) -> AsyncIterator[Connection]:
    ImpatientProtocol.ended = asyncio.Event()
    config = uvicorn.Config(application, port=0, http=ImpatientProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    if kernel_bytes:
        # What it takes from callers' answers; accepted connections have it too.
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


async def answer_to(*pieces: bytes) -> bytes:
    """Return everything that the server sends until it closes."""
    async with connected() as (reader, writer), asyncio.timeout(10):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


@pytest.mark.parametrize(
    "sent",
    [
        b"POST",
        HEAD,
        HEAD + b"content-length: 5\r\n\r\n",
        HEAD + b"content-length: 5\r\n\r\nab",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
async def test_half_a_request_is_refused_with_408(sent: bytes) -> None:
    answer = await answer_to(sent)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer


async def test_a_silent_connection_is_closed() -> None:
    assert b"" == await answer_to()


async def test_a_head_that_is_too_large_is_refused_before_it_ends() -> None:
    lines = [b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100)]

    assert (await answer_to(HEAD, *lines)).startswith(b"HTTP/1.1 431 ")


async def test_a_large_body_does_not_count_as_head() -> None:
    body = b"z" * 500_000
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)

    assert (await answer_to(head + body)).startswith(b"HTTP/1.1 200 ")


async def test_sequential_requests_on_one_connection_are_answered() -> None:
    async with connected() as (reader, writer), asyncio.timeout(10):
        for _ in range(3):
            writer.write(HEAD + b"content-length: 2\r\n\r\nab")
            await reader.readuntil(b"xx")


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with connected() as (reader, writer), asyncio.timeout(10):
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await ImpatientProtocol.ended.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(30_000_000)


async def test_100_continue_is_sent_before_the_body() -> None:
    async with connected() as (reader, writer), asyncio.timeout(10):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == await reader.readuntil(b"\r\n\r\n")
        writer.write(b"ab")
        assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200 ")


async def test_malformed_http_is_refused_with_json() -> None:
    answer = await answer_to(b"NONSENSE\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in answer


@asynccontextmanager
async def deaf(path: str, kernel_bytes: int = 0) -> AsyncIterator[socket.socket]:
    """Connect a client with a small buffer that has sent a request, and reads when the test does."""
    async with connected(kernel_bytes) as (_, writer), asyncio.timeout(30):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, writer.get_extra_info("peername"))
            await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            yield client


async def test_a_slow_client_gets_its_whole_reply() -> None:
    loop = asyncio.get_running_loop()
    started_s, got = loop.time(), 0
    async with deaf("/large") as client:
        while got < SIZES["/large"]:
            piece = await loop.sock_recv(client, 300_000)
            assert piece
            got += len(piece)
            # Slower than the bound alone would allow.
            await asyncio.sleep(max(0.0, started_s + got / 20_000_000 - loop.time()))

    assert loop.time() - started_s > ImpatientProtocol.write_timeout_s


@pytest.mark.parametrize(("path", "kernel_bytes"), [("/large", 0), ("/small", 4096)])
async def test_a_client_that_stops_reading_is_disconnected(path: str, kernel_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    got = 0
    async with deaf(path, kernel_bytes) as client:
        await loop.sock_recv(client, 1000)
        await asyncio.sleep(1)  # The server's timer is a real one.
        # What the kernel has taken still comes, and then an end.
        while piece := await loop.sock_recv(client, 1_000_000):
            got += len(piece)

    assert got < SIZES[path] - 1000


async def whole_answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer at once if the server allows it, and report in the body whether it did."""
    while (await receive()).get("more_body"):
        pass
    line = scope["extensions"][CONNECTION]
    body, value = b"whole", scope["query_string"].replace(b"%0A", b"\n")
    headers = [(b"content-length", b"5"), (b"x-told", value)]
    if line.answer(200, headers, body):
        return
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"parts"})


@pytest.mark.parametrize(
    ("request_", "body", "closed"),
    [
        pytest.param(b"POST /?a HTTP/1.1\r\nhost: x\r\n\r\n", b"whole", False, id="kept"),
        pytest.param(b"POST /?a HTTP/1.1\r\nconnection: close\r\n\r\n", b"parts", True, id="closing"),
        pytest.param(b"POST /?a HTTP/1.0\r\n\r\n", b"parts", True, id="1.0"),
    ],
)
async def test_a_reply_is_sent_at_once_on_a_persistent_connection(
    request_: bytes, body: bytes, closed: bool
) -> None:
    async with connected(application=whole_answer) as (reader, writer):
        writer.write(request_)
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(5) == body
        assert b"date: " in head
        assert (b"connection: close" in head) is closed
        if closed:
            assert await reader.read() == b""


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async with connected(application=whole_answer) as (reader, writer):
        writer.write(b"POST /?a%0Ab:c HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.read() == b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected(application=whole_answer) as (reader, writer):
        asked = [b"POST /?%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5)]
        writer.write(b"".join(asked))
        for number in range(5):
            assert b"x-told: %d\r\n" % number in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"whole"


@pytest.mark.parametrize("body_bytes", [0, 100_000])
async def test_a_waiting_call_learns_of_the_connections_end(body_bytes: int) -> None:
    asked, told, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    answered: list[bool] = []

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        scope["extensions"][CONNECTION].on_lost = told.set
        asked.set()
        await told.wait()
        answered.append(True)
        ended.set()

    async with connected(application=waiting) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % body_bytes)
        await asyncio.sleep(0.05)
        writer.write(b"x" * body_bytes)
        await asyncio.wait_for(asked.wait(), 5)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 5)

    assert answered == [True]


async def test_an_answered_call_ignores_the_connections_end() -> None:
    told: list[str] = []

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        line = scope["extensions"][CONNECTION]
        line.on_lost = lambda: told.append(scope["path"])
        assert line.answer(200, [(b"content-length", b"0")], b"")

    async with connected(application=answering) as (reader, writer):
        writer.write(b"POST /one HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await asyncio.sleep(0.05)

    assert told == []


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Return path and body; /slow waits until the test releases it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["path"] == "/slow":
        await ImpatientProtocol.released.wait()
    told = scope["path"].encode() + b"=" + body
    headers = [(b"content-length", b"%d" % len(told))]
    if not scope["extensions"][CONNECTION].answer(200, headers, told):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})


async def bodies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Return the status and body of so many replies."""
    found = []
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.findall(rb"content-length: (\d+)", head)[0])
        found.append(head.split(b" ")[1] + b" " + await reader.readexactly(size))
    return found


H2C = b"connection: Upgrade, HTTP2-Settings, x-a\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
HIDDEN = b"GET /admin HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("offer", [H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"])
async def test_protocol_upgrades_are_answered_in_http_1(offer: bytes, pieces: int) -> None:
    request = b"POST /a HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (offer, len(HIDDEN), HIDDEN)
    sent = request + b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nb"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(10):
        size = -(-len(sent) // pieces)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await writer.drain()
            await asyncio.sleep(0.01)
        # A body that reads like a request is a body.
        assert [b"200 /a=" + HIDDEN, b"200 /b=b"] == await bodies(reader, 2)


async def test_many_upgrade_requests_in_one_packet_are_answered() -> None:
    one = b"POST /%d HTTP/1.1\r\nupgrade: x\r\nconnection: upgrade\r\ncontent-length: 1\r\n\r\nz"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(10):
        writer.write(b"".join(one % number for number in range(600)))
        assert [b"200 /%d=z" % number for number in range(600)] == await bodies(reader, 600)


async def test_connect_is_refused() -> None:
    assert b" 400 " in await answer_to(b"CONNECT admin:80 HTTP/1.1\r\nhost: x\r\n\r\n")


async def test_reading_pauses_while_pipelined_requests_wait() -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(20):
        ImpatientProtocol.released = asyncio.Event()
        one = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n" + b"x" * 4000
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        sending = asyncio.create_task(_send(writer, [one % number for number in range(5000)]))
        await asyncio.sleep(0.3)
        # The kernel's buffers are full: what was read of 20 MB is one read's worth.
        assert not sending.done()
        [protocol] = ImpatientProtocol.there
        assert sum(len(cycle.body) for cycle, _ in protocol.pipeline) < 1_000_000
        ImpatientProtocol.released.set()
        answers = await bodies(reader, 5001)
        assert [b"200 /slow=", *(b"200 /%d=" % number + b"x" * 4000 for number in range(5000))] == answers
        await sending


async def _send(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        pytest.param(b"BROKEN / GARBAGE\r\n\r\n", b"400", id="no-http"),
        pytest.param(b"POST /half", b"408", id="half-a-head"),
        pytest.param(b"POST /half HTTP/1.1\r\ncontent-length: 9\r\n\r\nab", b"408", id="half-a-body"),
        pytest.param(b"GET /long HTTP/1.1\r\nx: " + b"a" * 200_000, b"431", id="endless-head"),
    ],
)
async def test_complete_requests_are_answered_before_a_malformed_one_is_refused(
    behind: bytes, status: bytes
) -> None:
    async with connected(application=echo) as (reader, writer), asyncio.timeout(10):
        ImpatientProtocol.released = asyncio.Event()
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok" + behind)
        await asyncio.sleep(ImpatientProtocol.head_timeout_s * 2)
        ImpatientProtocol.released.set()
        assert [b"200 /slow=ok"] == await bodies(reader, 1)
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)


async def test_many_small_requests_do_not_count_as_a_large_head() -> None:
    one = b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    async with connected(application=echo) as (reader, writer), asyncio.timeout(20):
        sending = asyncio.create_task(_send(writer, [b"".join(one % number for number in range(4000))]))
        assert [b"200 /%d=" % number for number in range(4000)] == await bodies(reader, 4000)
        await sending


async def test_a_client_that_abandons_requests_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(application=echo) as (_, writer), asyncio.timeout(10):
        ImpatientProtocol.released = asyncio.Event()
        writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" * 3)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        ImpatientProtocol.released.set()
        await ImpatientProtocol.ended.wait()
        await asyncio.sleep(0.05)
    assert "Exception" not in caplog.text
