"""A client's connection that costs little: HTTP/1.1 kept alive, one request at a time, callbacks."""

import asyncio
import re
from collections.abc import Callable
from typing import cast

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")
_LAST_CHUNK = b"0\r\n\r\n"
_ADVICE = b"\r\nretry-after:"
GOOD = 200


class Answer(msgspec.Struct, frozen=True):
    """status 0: the connection broke first. body: empty where it was not kept.

    advised: it says when to come again.
    """

    status: int
    size: int
    body: bytes = b""
    advised: bool = False


LOST = Answer(0, 0)
Done = Callable[["Connection", Answer], None]


class Connection(asyncio.Protocol):
    """done is called once for each request sent, with the answer or with LOST."""

    def __init__(self, done: Done) -> None:
        self.closed = False
        self.busy = False
        # What the owner wants to find again when the answer comes.
        self.note: object = None
        self._done = done
        self._keep = False
        self._transport: asyncio.Transport
        self._reset()

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._head = b""
        self._status = 0
        self._size = 0
        self._left = 0
        self._chunked = False
        self._last = b""
        self._advised = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server took it."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """A request under way will have no answer."""
        del exc
        self.closed = True
        if self.busy:
            self._finish(LOST)

    def send(self, request: bytes, *, keep: bool = False) -> None:
        """Write it; keep: the answer's body is wanted."""
        self.busy = True
        self._keep = keep
        self._transport.write(request)

    def close(self) -> None:
        """At once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count the body's bytes, whatever pieces they come in."""
        if self._status == 0:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._begin(data, end)
            data = data[end:] if self._keep or self._chunked or len(data) > end else b""
        self._size += len(data)
        if self._keep:
            self._parts.append(data)
        if self._chunked:
            # No body here holds a line break, so that two in a row end it.
            self._last = (self._last + data)[-len(_LAST_CHUNK) :]
            complete = self._last == _LAST_CHUNK
        else:
            complete = self._size >= self._left
        if complete:
            body = b"".join(self._parts)
            body = _joined(body) if self._chunked else body
            self._finish(Answer(self._status, self._size, body, self._advised))

    def _begin(self, data: bytes, end: int) -> None:
        self._status = int(data[9:12])
        found = _LENGTH.search(data, 0, end)
        self._chunked = found is None
        self._left = int(found[1]) if found else 0
        self._advised = self._status != GOOD and _ADVICE in data[:end].lower()
        if _CLOSE.search(data, 0, end):
            # It will take no further request.
            self.closed = True

    def _finish(self, answer: Answer) -> None:
        self.busy = False
        self._reset()
        self._done(self, answer)


def _joined(chunks: bytes) -> bytes:
    parts, at = [], 0
    while found := _CHUNK.match(chunks, at):
        size = int(found[1], 16)
        parts.append(chunks[found.end() : found.end() + size])
        at = found.end() + size + 2
    return b"".join(parts)


async def connect(host: str, port: int, done: Done, timeout_s: float = 5.0) -> Connection:
    """Raises: OSError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(done), host, port)
    return connection
