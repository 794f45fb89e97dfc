"""Cheap client connection: HTTP/1.1 with keep-alive, one request at a time, callbacks."""

import asyncio
import re
from collections.abc import Callable
from typing import cast

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")
_LAST_CHUNK = b"0\r\n\r\n"
_RETRY_AFTER = b"\r\nretry-after:"
OK = 200


class Reply(msgspec.Struct, frozen=True):
    """One HTTP reply.

    status: 0 where the connection broke first. body: empty unless the sender wanted it. has_retry_after:
    the reply carries a `retry-after` header.
    """

    status: int
    size: int
    body: bytes = b""
    has_retry_after: bool = False


LOST = Reply(0, 0)
OnReply = Callable[["ClientConnection", Reply], None]


class ClientConnection(asyncio.Protocol):
    """Connection that calls `on_reply` once per request, with the reply or with LOST."""

    def __init__(self, on_reply: OnReply) -> None:
        self.closed = False
        self.busy = False
        # State of the owner's current call, for its callback.
        self.context: object = None
        self._on_reply = on_reply
        self._wants_body = False
        self._transport: asyncio.Transport
        self._reset()

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._head = b""
        self._status = 0
        self._size = 0
        self._body_bytes = 0
        self._chunked = False
        self._tail = b""
        self._has_retry_after = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report LOST for a request without its reply."""
        del exc
        self.closed = True
        if self.busy:
            self._finish(LOST)

    def send(self, request: bytes, *, wants_body: bool = False) -> None:
        """Write a request; `wants_body` keeps the reply's body."""
        self.busy = True
        self._wants_body = wants_body
        self._transport.write(request)

    def close(self) -> None:
        """Close at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count the body's bytes, in whatever pieces they arrive."""
        if self._status == 0:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._read_head(data, end)
            data = data[end:] if self._wants_body or self._chunked or len(data) > end else b""
        self._size += len(data)
        if self._wants_body:
            self._parts.append(data)
        if self._chunked:
            # No body here holds a line break, therefore two in a row end it.
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            complete = self._tail == _LAST_CHUNK
        else:
            complete = self._size >= self._body_bytes
        if complete:
            body = b"".join(self._parts)
            body = _joined_chunks(body) if self._chunked else body
            self._finish(Reply(self._status, self._size, body, self._has_retry_after))

    def _read_head(self, data: bytes, end: int) -> None:
        self._status = int(data[9:12])
        length = _LENGTH.search(data, 0, end)
        self._chunked = length is None
        self._body_bytes = int(length[1]) if length else 0
        self._has_retry_after = self._status != OK and _RETRY_AFTER in data[:end].lower()
        if _CLOSE.search(data, 0, end):
            # The server accepts no further request on it.
            self.closed = True

    def _finish(self, reply: Reply) -> None:
        self.busy = False
        self._reset()
        self._on_reply(self, reply)


def _joined_chunks(chunks: bytes) -> bytes:
    parts, at = [], 0
    while size_line := _CHUNK.match(chunks, at):
        size = int(size_line[1], 16)
        parts.append(chunks[size_line.end() : size_line.end() + size])
        at = size_line.end() + size + 2
    return b"".join(parts)


async def connect(host: str, port: int, on_reply: OnReply, timeout_s: float = 5.0) -> ClientConnection:
    """Open a connection.

    Raises: OSError, TimeoutError.
    """
    async with asyncio.timeout(timeout_s):
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: ClientConnection(on_reply), host, port)
    return connection
