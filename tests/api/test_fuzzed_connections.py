"""Generated mixtures of pipelined requests: replies come in order, and no body or trailer acts as a request.

FUZZ_CASES is the number of cases (`make fuzz`). `make test` runs fewer cases, always the same.
"""

import asyncio
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.server.http_protocol import CONNECTION, bounded_protocol
from gateway.api.server.in_flight import InFlight
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("FUZZ_CASES", "0"))
FEW = 60
FIELDS = (b"authorization", b"x-forwarded-for", b"connection", b"expect", b"upgrade", b"x-request-id")
BODIES = st.sampled_from(
    [b"", b"a", b"GET /hidden HTTP/1.1\r\n\r\n", b"0\r\n\r\n", b"z" * 70_000]
) | st.binary(max_size=40)


class Piped(msgspec.Struct, frozen=True):
    """One request. early: it is answered before its body. trailers: names of fields after the body."""

    body: bytes
    early: bool
    chunked: bool
    chunk_bytes: int
    extension: bytes
    trailers: tuple[bytes, ...]
    upgrade: bool

    def encode(self, number: int, *, last: bool) -> bytes:
        """Return the request as it is sent."""
        path = b"/early" if self.early else b"/whole"
        lines = [b"POST %b/%d HTTP/1.1" % (path, number), b"host: x"]
        if self.upgrade:
            lines += [b"upgrade: h2c", b"connection: upgrade"]
        if last:
            lines.append(b"connection: close")
        if not self.chunked:
            lines.append(b"content-length: %d" % len(self.body))
            return b"\r\n".join([*lines, b"", b""]) + self.body
        lines.append(b"transfer-encoding: chunked")
        chunks = [
            self.body[start : start + self.chunk_bytes]
            for start in range(0, len(self.body), self.chunk_bytes)
        ]
        pieces = [b"%x%b\r\n%b\r\n" % (len(chunk), self.extension, chunk) for chunk in chunks]
        trailers = [b"%b: trailer\r\n" % name for name in self.trailers]
        return b"\r\n".join([*lines, b"", b""]) + b"".join([*pieces, b"0\r\n", *trailers, b"\r\n"])


REQUESTS = st.builds(
    Piped,
    body=BODIES,
    early=st.integers(0, 5).map(lambda number: number == 0),
    chunked=st.booleans(),
    chunk_bytes=st.sampled_from([7, 100, 5000]),
    extension=st.sampled_from([b"", b";a=b"]),
    trailers=st.lists(st.sampled_from(FIELDS), max_size=3).map(tuple),
    upgrade=st.integers(0, 7).map(lambda number: number == 0),
)


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Reply with path, headers from trailers, and digest of the body. /early replies before the body."""
    body = b""
    more = not scope["path"].startswith("/early")
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    found = sum(value == b"trailer" for _, value in scope["headers"])
    digest = hashlib.sha256(body).hexdigest()
    reply = f"{scope['path']} {found} {digest}".encode()
    headers = [(b"content-length", b"%d" % len(reply))]
    if not scope["extensions"][CONNECTION].answer(200, headers, reply):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})


class Server:
    """Server of this process, on its own event loop. in_flight: counts the bytes of its replies."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.in_flight = InFlight(10_000_000)
        protocol = bounded_protocol(self.in_flight, 100)
        config = uvicorn.Config(answering, http=protocol, lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serving = self.runner.get_loop().create_task(self._server.serve([self._listener]))
        self.runner.run(self._wait_until_started())

    async def _wait_until_started(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)

    async def exchange(self, pieces: list[bytes]) -> bytes:
        """Send pieces, and return everything that comes back until the server closes the connection."""
        reader, writer = await asyncio.open_connection(*self._listener.getsockname())
        async with asyncio.timeout(PATIENCE_S):
            reading = asyncio.create_task(reader.read())
            for piece in pieces:
                if reading.done():
                    break
                writer.write(piece)
                # One turn of the loop for the server, so that pieces arrive apart.
                await asyncio.sleep(0)
            replies = await reading
        writer.transport.abort()
        return replies

    async def _stop(self) -> None:
        self._server.should_exit = True
        await self._serving

    def close(self) -> None:
        """Stop the server and its event loop."""
        self.runner.run(self._stop())
        self.runner.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.timeout(3600 if CASES else 300)
def test_pipelined_mixtures_are_answered_in_order(server: Server) -> None:
    @settings(
        max_examples=CASES * 10 or FEW,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(REQUESTS, min_size=1, max_size=6), st.lists(st.integers(0, 400), max_size=8))
    def check(requests: list[Piped], cuts: list[int]) -> None:
        sent = [
            request.encode(number, last=number == len(requests) - 1)
            for number, request in enumerate(requests)
        ]
        replies = server.runner.run(server.exchange(list(_cut(b"".join(sent), cuts))))
        _assert_in_order(requests, replies)
        assert server.in_flight.bytes == 0

    check()


def _cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


def _assert_in_order(requests: list[Piped], replies: bytes) -> None:
    parts = replies.split(b"HTTP/1.1 ")[1:]
    assert parts
    assert len(parts) <= len(requests)
    for number, (request, part) in enumerate(zip(requests, parts, strict=False)):
        assert part.startswith(b"200 ")
        path, found, digest = part.partition(b"\r\n\r\n")[2].split(b" ")
        assert b"/%b/%d" % (b"early" if request.early else b"whole", number) == path
        assert b"0" == found
        body = b"" if request.early else request.body
        assert hashlib.sha256(body).hexdigest().encode() == digest
    closes = [bool(re.search(rb"\r\nconnection: close\r\n", part)) for part in parts]
    # Only the last request, or one that was answered before its body, ends the connection.
    assert [*[False] * (len(parts) - 1), True] == closes
    assert len(parts) == len(requests) or requests[len(parts) - 1].early
