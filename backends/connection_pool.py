"""HTTP/1.1 to one origin over kept-alive connections, parsed by httptools; its failures are httpx's.

httpx's own pool carries 513 calls a second on one core where aiohttp's carries 2,300, and that one still
takes a third of a call's CPU. What is asked here is little: whole bodies, no redirects, proxies or cookies.
Rule: a connection serves one request at a time, and one that is not at rest after it is closed.
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

# The largest honest reply is 2,048 vectors of 8,192 JSON numbers; past this it is a fault.
REPLY_LIMIT_BYTES = 512 * 1024 * 1024
HEAD_LIMIT_BYTES = 256 * 1024


class RequestTemplate(msgspec.Struct, frozen=True):
    """What requests of one kind have in common. head: method, path and headers as they are sent."""

    method: str
    url: httpx.URL
    headers: tuple[tuple[bytes, bytes], ...]
    head: bytes


def request_template(method: str, url: httpx.URL, headers: httpx.Headers) -> RequestTemplate:
    """Made once, for all requests of a kind."""
    lines = tuple(headers.raw)
    first = b"%b %b HTTP/1.1\r\n" % (method.encode(), url.raw_path)
    return RequestTemplate(method, url, lines, b"".join([first, *[b"%b: %b\r\n" % line for line in lines]]))


class RawResponse(msgspec.Struct, frozen=True):
    """A whole answer, as it came."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Transport(Protocol):
    """How requests get to their server."""

    async def ask(
        self, target: RequestTemplate, more: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RawResponse:
        """A whole answer; more: headers of this request alone. Raises: what httpx's transports raise."""

    async def aclose(self) -> None:
        """Close every connection; what is asked over one fails."""


class Connector(Protocol):
    """How a connection to the origin is made: by name, by one address of it, or by a Unix socket."""

    async def __call__(self, factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        """Raises: OSError, ssl.SSLError."""


def tcp_connector(url: httpx.URL, context: ssl.SSLContext, ip: str | None = None) -> Connector:
    """Over TCP, to one address of the host where `ip` is given; certificates speak of the name."""
    is_tls = url.scheme == "https"
    port = url.port or (443 if is_tls else 80)

    async def open_(factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        loop = asyncio.get_running_loop()
        if not is_tls:
            return await loop.create_connection(factory, ip or url.host, port)
        return await loop.create_connection(
            factory, ip or url.host, port, ssl=context, server_hostname=url.host
        )

    return open_


def unix_connector(path: str) -> Connector:
    """Over a Unix socket."""

    async def open_(factory: "Callable[[], _Connection]") -> "tuple[object, _Connection]":
        return await asyncio.get_running_loop().create_unix_connection(factory, path)

    return open_


class ConnectionPool:
    """connect_timeout_s: for one connection. idle_s: how long one that nobody uses is kept."""

    def __init__(self, opener: Connector, connect_timeout_s: float, idle_s: float) -> None:
        self._opener = opener
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        # The one used last is taken first, so that the others can grow old.
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._reuses = True

    async def ask(
        self, target: RequestTemplate, more: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RawResponse:
        """A whole answer. Raises: httpx.ConnectError, ConnectTimeout, ReadError, RemoteProtocolError."""
        connection = self._rested() or await self._open()
        self._busy.add(connection)
        try:
            return await connection.ask(_head(target, more, len(body)), body)
        finally:
            self._busy.discard(connection)
            self._put_back(connection)

    async def aclose(self) -> None:
        """Close every connection; what is asked over one fails."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        # A transport that was told to close does so in the loop's next turn.
        await asyncio.sleep(0)

    def _rested(self) -> "_Connection | None":
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.at_rest and connection.rested_s > oldest_s:
                return connection
            connection.close()
        return None

    async def _open(self) -> "_Connection":
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._opener(partial(_Connection, self._strayed))
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError("no connection") from error
        return connection

    def _strayed(self) -> None:
        """Somebody there answers what was not asked: what comes next on a kept connection may be another's.

        Told of once, and from then on each request has a connection of its own.
        """
        if self._reuses:
            self._reuses = False
            logger.warning("a server answers unasked; its connections are not used twice from now on")
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _put_back(self, connection: "_Connection") -> None:
        if not (connection.at_rest and self._reuses):
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.rested_s = loop.time()
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close those that nobody has used for their time, and look again when the next one's is over."""
        self._sweeping = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._idle_s
        while self._idle and (self._idle[0].rested_s <= oldest_s or not self._idle[0].at_rest):
            self._idle.popleft().close()
        if self._idle:
            self._sweeping = loop.call_at(self._idle[0].rested_s + self._idle_s, self._sweep)


def _head(target: RequestTemplate, more: Sequence[tuple[bytes, bytes]], size: int) -> bytes:
    end = b"content-length: %d\r\n\r\n" % size if size or target.method == "POST" else b"\r\n"
    return b"".join([target.head, *[b"%b: %b\r\n" % pair for pair in more], end])


class _Connection(asyncio.Protocol):
    """One connection, and the answer that is being read from it."""

    def __init__(self, strayed: Callable[[], None]) -> None:
        self._strayed = strayed
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._asked: asyncio.Future[RawResponse] | None = None
        self._kept = True
        self.rested_s = 0.0
        self._begin()

    @property
    def at_rest(self) -> bool:
        """Whether it can take a request: open, and nothing owed on either side."""
        return self._kept and self._asked is None and self._transport is not None

    async def ask(self, head: bytes, body: bytes) -> RawResponse:
        """Send a request and wait for the whole of its answer."""
        assert self._transport is not None
        self._asked = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines((head, body))
            return await self._asked
        except asyncio.CancelledError:
            # The answer would come to nobody, or to whoever asks next.
            self._kept = False
            raise
        finally:
            self._asked = None

    def close(self) -> None:
        """At once, whatever is on its way; whoever waits hears of it."""
        self._kept = False
        # Parser and connection hold each other: what was read of an answer would stay until they are found.
        self._begin()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's: it is open."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: it is closed, which is the end of an answer that told no length."""
        self._kept, self._transport = False, None
        if exc is None and self._in_body and self._until_closed:
            self.on_message_complete()
        self._fail(httpx.ReadError("the connection broke"))
        self._begin()
        self._parser = None

    def data_received(self, data: bytes) -> None:
        """asyncio's: some bytes of an answer."""
        if self._asked is None or self._parser is None:
            self._unasked()
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(httpx.RemoteProtocolError("this is not HTTP/1.1"))
            self.close()

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._size = 0
        self._in_body = False
        self._until_closed = True

    def _unasked(self) -> None:
        # Who gives up in the very turn in which the answer comes has asked for it all the same.
        given_up = self._asked is not None and self._asked.cancelled()
        if not given_up and self._transport is not None and not self._transport.is_closing():
            self._strayed()
        self._kept = False

    def _fail(self, error: httpx.RequestError) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """The first byte of an answer; one that nobody asked for would be taken for the next request's."""
        if self._asked is None or self._asked.done():
            self._unasked()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        self._size += len(name) + len(value)
        if self._size > HEAD_LIMIT_BYTES:
            self._fail(httpx.DecodingError("the reply's head is too large"))
            self.close()
            return
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_body = True
        self._size = 0

    def on_body(self, piece: bytes) -> None:
        """Some of the body."""
        self._size += len(piece)
        if self._size > REPLY_LIMIT_BYTES:
            self._fail(httpx.DecodingError("the reply is too large"))
            self.close()
            return
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is whole; one of 1xx only says that another will come."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        headers, pieces = self._headers, self._pieces
        self._begin()
        if status < 200:
            return
        self._kept = self._kept and self._parser.should_keep_alive()
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._asked is None or self._asked.done():
            self._kept = False
            return
        self._asked.set_result(RawResponse(status, headers, body))
