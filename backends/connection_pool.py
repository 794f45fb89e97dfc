"""HTTP/1.1 connection pool of one origin, parsed by httptools; it raises httpx's exceptions.

httpx's own pool carries 513 requests per second on one core where aiohttp's carries 2,300, and aiohttp still
takes a third of a request's CPU. The needs here are small: complete bodies, no redirects, proxies or cookies.
Rule: a connection serves one request at a time, and it is closed unless it is idle afterwards.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import httptools
import httpx
import msgspec

logger = logging.getLogger(__name__)

# The largest valid reply is 2,048 vectors of 8,192 JSON numbers; anything larger is a fault.
REPLY_LIMIT_BYTES = 512 * 1024 * 1024
HEAD_LIMIT_BYTES = 256 * 1024


class RequestTemplate(msgspec.Struct, frozen=True):
    """Constant part of similar requests. head: request line and headers in wire format."""

    method: str
    url: httpx.URL
    headers: tuple[tuple[bytes, bytes], ...]
    head: bytes


def request_template(method: str, url: httpx.URL, headers: httpx.Headers) -> RequestTemplate:
    """Return the parts shared by all requests with the same method, URL and headers."""
    lines = tuple(headers.raw)
    request_line = b"%b %b HTTP/1.1\r\n" % (method.encode(), url.raw_path)
    head = b"".join([request_line, *[b"%b: %b\r\n" % line for line in lines]])
    return RequestTemplate(method, url, lines, head)


class RawResponse(msgspec.Struct, frozen=True):
    """Complete response with undecoded headers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Transport(Protocol):
    """Sender of requests to one origin."""

    async def send(
        self, template: RequestTemplate, extra: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RawResponse:
        """Send a request and return the complete response. extra: headers of this request only.

        Raises: the exceptions of httpx's transports.
        """

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail."""


class Connector(Protocol):
    """Opener of a connection to the origin: by host name, by IP address or by Unix socket."""

    async def __call__(self, factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        """Open a connection.

        Raises: OSError, ssl.SSLError.
        """


def tcp_connector(url: httpx.URL, context: ssl.SSLContext, ip: str | None = None) -> Connector:
    """Return a connector over TCP. ip: connect to this address; the certificate is checked for the name."""
    is_tls = url.scheme == "https"
    port = url.port or (443 if is_tls else 80)

    async def connect(factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        loop = asyncio.get_running_loop()
        if not is_tls:
            return await loop.create_connection(factory, ip or url.host, port)
        return await loop.create_connection(
            factory, ip or url.host, port, ssl=context, server_hostname=url.host
        )

    return connect


def unix_connector(path: str) -> Connector:
    """Return a connector to a Unix socket."""

    async def connect(factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        return await asyncio.get_running_loop().create_unix_connection(factory, path)

    return connect


class ConnectionPool:
    """Pool of kept-alive connections to one origin.

    connect_timeout_s: limit for opening one connection. idle_s: lifetime of an idle connection.
    """

    def __init__(self, connector: Connector, connect_timeout_s: float, idle_s: float) -> None:
        self._connector = connector
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        # Last in, first out: the connection used last is taken first, so that surplus ones expire.
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._reuse_allowed = True

    async def send(
        self, template: RequestTemplate, extra: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RawResponse:
        """Send a request and return the complete response.

        Raises: httpx.ConnectError, ConnectTimeout, ReadError, RemoteProtocolError, DecodingError.
        """
        connection = self._take_idle() or await self._open()
        self._busy.add(connection)
        try:
            return await connection.send(_head(template, extra, len(body)), body)
        finally:
            self._busy.discard(connection)
            self._release(connection)

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail."""
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        # An aborted transport closes in the next iteration of the loop.
        await asyncio.sleep(0)

    def _take_idle(self) -> "_Connection | None":
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle and connection.idle_since_s > oldest_s:
                return connection
            connection.close()
        return None

    async def _open(self) -> "_Connection":
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._connector(partial(_Connection, self._disable_reuse))
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError("no connection") from error
        return connection

    def _disable_reuse(self) -> None:
        """Stop reusing connections, because this server sends data that no request asked for.

        On a reused connection such data could be taken for the response to a different request. The warning
        is logged once, and each later request opens its own connection.
        """
        if self._reuse_allowed:
            self._reuse_allowed = False
            logger.warning("a server sends unsolicited responses; its connections are no longer reused")
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _release(self, connection: "_Connection") -> None:
        if not (connection.is_idle and self._reuse_allowed):
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(self._idle_s, self._close_expired)

    def _close_expired(self) -> None:
        """Close expired idle connections and schedule the next check for the next expiry."""
        self._expiry_timer = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._idle_s
        while self._idle and (self._idle[0].idle_since_s <= oldest_s or not self._idle[0].is_idle):
            self._idle.popleft().close()
        if self._idle:
            self._expiry_timer = loop.call_at(self._idle[0].idle_since_s + self._idle_s, self._close_expired)


def _head(template: RequestTemplate, extra: Sequence[tuple[bytes, bytes]], size: int) -> bytes:
    end = b"content-length: %d\r\n\r\n" % size if size or template.method == "POST" else b"\r\n"
    return b"".join([template.head, *[b"%b: %b\r\n" % pair for pair in extra], end])


class _Connection(asyncio.Protocol):
    """One connection and the response being read from it. on_unsolicited: called on unsolicited data."""

    def __init__(self, on_unsolicited: Callable[[], None]) -> None:
        self._on_unsolicited = on_unsolicited
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.Future[RawResponse] | None = None
        self._reusable = True
        self.idle_since_s = 0.0
        self._reset()

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and no request or response is outstanding."""
        return self._reusable and self._pending is None and self._transport is not None

    async def send(self, head: bytes, body: bytes) -> RawResponse:
        """Send a request and wait for the complete response."""
        assert self._transport is not None
        self._pending = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines((head, body))
            return await self._pending
        except asyncio.CancelledError:
            # The response may still arrive, and must not be taken for that of the next request.
            self._reusable = False
            raise
        finally:
            self._pending = None

    def close(self) -> None:
        """Close immediately; a request in flight fails."""
        self._reusable = False
        # Parser and connection reference each other, so that the data read would otherwise stay in memory
        # until the garbage collector runs.
        self._reset()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the transport; called by asyncio when the connection is open."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response; called by asyncio when the connection is closed.

        A response without a length ends when the connection closes.
        """
        self._reusable, self._transport = False, None
        if exc is None and self._in_body and self._until_closed:
            self.on_message_complete()
        self._fail(httpx.ReadError("the connection broke"))
        self._reset()
        self._parser = None

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response; called by asyncio."""
        if self._pending is None or self._parser is None:
            self._reject_unsolicited()
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(httpx.RemoteProtocolError("this is not HTTP/1.1"))
            self.close()

    def _reset(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._in_body = False
        self._until_closed = True

    def _reject_unsolicited(self) -> None:
        # A request cancelled in the same loop iteration in which its response arrives did ask for it.
        is_cancelled = self._pending is not None and self._pending.cancelled()
        if not is_cancelled and self._transport is not None and not self._transport.is_closing():
            self._on_unsolicited()
        self._reusable = False

    def _fail(self, error: httpx.RequestError) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Detect a response without a request, which would be taken for that of the next request."""
        if self._pending is None or self._pending.done():
            self._reject_unsolicited()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header, within the limit of the head."""
        self._size += len(name) + len(value)
        if self._size > HEAD_LIMIT_BYTES:
            self._fail(httpx.DecodingError("the reply's head is too large"))
            self.close()
            return
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        """Start counting the body."""
        self._in_body = True
        self._size = 0

    def on_body(self, piece: bytes) -> None:
        """Store a part of the body, within the limit of the reply."""
        self._size += len(piece)
        if self._size > REPLY_LIMIT_BYTES:
            self._fail(httpx.DecodingError("the reply is too large"))
            self.close()
            return
        self._chunks.append(piece)

    def on_message_complete(self) -> None:
        """Deliver the response; a status of 1xx only announces a later response."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        headers, chunks = self._headers, self._chunks
        self._reset()
        if status < 200:
            return
        self._reusable = self._reusable and self._parser.should_keep_alive()
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self._pending is None or self._pending.done():
            self._reusable = False
            return
        self._pending.set_result(RawResponse(status, headers, body))
