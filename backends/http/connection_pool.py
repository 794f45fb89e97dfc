"""HTTP/1.1 connection pool of one origin; it raises httpx's exceptions.

httpx's own pool carries 513 requests per second on one core where aiohttp's carries 2,300, and aiohttp still
takes a third of a request's CPU. The needs here are small: complete bodies, no redirects, proxies or cookies.
Rule: a connection serves one request at a time, and it is closed unless it is idle afterwards. A request is
sent a second time only if its kept-alive connection ended without any answer to it; the work is pure.
"""

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import httpx
import msgspec

from backends.contract import ConnectionFault, ReportFault, ignore_fault
from backends.http.connection import Connection, StaleConnection
from backends.http.responses import REPLY_LIMIT_BYTES, RawResponse, is_closing_error

# Time without kept-alive connections after unsolicited data. It doubles each time up to the maximum.
REUSE_PAUSE_MIN_S = 60.0
REUSE_PAUSE_MAX_S = 3600.0


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


class Transport(Protocol):
    """Sender of requests to one origin."""

    async def send(
        self,
        template: RequestTemplate,
        extra: Sequence[tuple[bytes, bytes]],
        body: bytes,
        reply_bytes_max: int | None = None,
    ) -> RawResponse:
        """Send a request and return the complete response.

        extra: headers of this request only. reply_bytes_max: bound on the body, None for that of all replies.

        Raises: the exceptions of httpx's transports.
        """

    def drop_idle(self) -> None:
        """Close the idle connections, so that the next request opens a new one."""

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail."""


class Connector(Protocol):
    """Opener of a connection to the origin: by host name, by IP address or by Unix socket."""

    async def __call__(self, factory: Callable[[], Connection]) -> tuple[object, Connection]:
        """Open a connection.

        Raises: OSError, ssl.SSLError.
        """


def tcp_connector(url: httpx.URL, context: ssl.SSLContext, ip: str | None = None) -> Connector:
    """Return a connector over TCP. ip: connect to this address; the certificate is checked for the name."""
    is_tls = url.scheme == "https"
    port = url.port or (443 if is_tls else 80)

    async def connect(factory: Callable[[], Connection]) -> tuple[object, Connection]:
        loop = asyncio.get_running_loop()
        if not is_tls:
            return await loop.create_connection(factory, ip or url.host, port)
        return await loop.create_connection(
            factory, ip or url.host, port, ssl=context, server_hostname=url.host
        )

    return connect


def unix_connector(path: str) -> Connector:
    """Return a connector to a Unix socket."""

    async def connect(factory: Callable[[], Connection]) -> tuple[object, Connection]:
        return await asyncio.get_running_loop().create_unix_connection(factory, path)

    return connect


class ReusePause:
    """Times in which a server's connections are not reused, because it sent unsolicited data.

    On a reused connection such data could be taken for the response to a different request.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self.ends_s = -math.inf

    def start(self, now_s: float) -> float:
        """Start a pause and return its length; 0 while one is in progress.

        The pause is twice the last one if that has not been over for as long as it lasted.
        """
        if now_s < self.ends_s:
            return 0.0
        is_repeated = now_s < self.ends_s + self._pause_s
        self._pause_s = min(self._pause_s * 2, REUSE_PAUSE_MAX_S) if is_repeated else REUSE_PAUSE_MIN_S
        self.ends_s = now_s + self._pause_s
        return self._pause_s


class PoolOptions(msgspec.Struct, frozen=True):
    """Settings of a pool.

    connect_timeout_s: limit for opening one connection. idle_s: lifetime of an idle connection. resends: send
    a request again if its kept-alive connection ended without an answer. report: called with each fault.
    reply_bytes_max: bound on the body of a response.
    """

    connect_timeout_s: float
    idle_s: float
    resends: bool = True
    report: ReportFault = ignore_fault
    reply_bytes_max: int = REPLY_LIMIT_BYTES


class ConnectionPool:
    """Pool of kept-alive connections to one origin."""

    def __init__(self, connector: Connector, options: PoolOptions) -> None:
        self._connector = connector
        self._options = options
        # Last in, first out: the connection used last is taken first, so that surplus ones expire.
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._reuse_pause = ReusePause()

    async def send(
        self,
        template: RequestTemplate,
        extra: Sequence[tuple[bytes, bytes]],
        body: bytes,
        reply_bytes_max: int | None = None,
    ) -> RawResponse:
        """Send a request and return the complete response.

        Raises: httpx.ConnectError, ConnectTimeout, ReadError, ReadTimeout, DecodingError.
        """
        head = _head(template, extra, len(body))
        connection = self._take_idle()
        if connection is None:
            return await self._exchange(await self._open(), head, body, reply_bytes_max)
        try:
            return await self._exchange(connection, head, body, reply_bytes_max)
        except StaleConnection:
            if not self._options.resends:
                raise
        self._options.report(ConnectionFault("stale"))
        try:
            connection = await self._open()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # The server may have worked on the request when it went away.
            raise httpx.ReadError("the connection broke, and no other was opened") from error
        return await self._exchange(connection, head, body, reply_bytes_max)

    def drop_idle(self) -> None:
        """Close the idle connections, so that the next request opens a new one."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail."""
        self._reuse_pause.ends_s = math.inf
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        # An aborted transport closes in the next iteration of the loop.
        await asyncio.sleep(0)

    async def _exchange(
        self, connection: Connection, head: bytes, body: bytes, reply_bytes_max: int | None
    ) -> RawResponse:
        self._busy.add(connection)
        try:
            return await connection.send(head, body, reply_bytes_max)
        finally:
            self._busy.discard(connection)
            self._release(connection)

    def _take_idle(self) -> Connection | None:
        oldest_s = asyncio.get_running_loop().time() - self._options.idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle and connection.idle_since_s > oldest_s:
                return connection
            connection.close()
        return None

    async def _open(self) -> Connection:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                bound = self._options.reply_bytes_max
                _, connection = await self._connector(partial(Connection, self._on_unsolicited, bound))
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError("no connection") from error
        return connection

    def _on_unsolicited(self, data: bytes) -> None:
        """Report data that no request asked for; pause reuse unless it only closes an idle connection."""
        if is_closing_error(data):
            self._options.report(ConnectionFault("idle_error"))
            return
        pause_s = self._reuse_pause.start(asyncio.get_running_loop().time())
        self._options.report(ConnectionFault("unsolicited", pause_s))
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _release(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if not connection.is_idle or now_s < self._reuse_pause.ends_s:
            connection.close()
            return
        connection.idle_since_s = now_s
        self._idle.append(connection)
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(self._options.idle_s, self._close_expired)

    def _close_expired(self) -> None:
        """Close expired idle connections and schedule the next check for the next expiry."""
        self._expiry_timer = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._options.idle_s
        while self._idle and (self._idle[0].idle_since_s <= oldest_s or not self._idle[0].is_idle):
            self._idle.popleft().close()
        if self._idle:
            self._expiry_timer = loop.call_at(
                self._idle[0].idle_since_s + self._options.idle_s, self._close_expired
            )


def _head(template: RequestTemplate, extra: Sequence[tuple[bytes, bytes]], size: int) -> bytes:
    end = b"content-length: %d\r\n\r\n" % size if size or template.method == "POST" else b"\r\n"
    return b"".join([template.head, *[b"%b: %b\r\n" % pair for pair in extra], end])
