"""Transport over httpx's, for upstreams behind a proxy or over HTTP/2, with the bounds of the own pool.

httpx's transport opens connections, tunnels through proxies and speaks HTTP/2. What the own pool has besides
is here: a bound on a reply while it is read, one further try of a request whose kept-alive connection ended
without an answer, and a way to leave idle connections.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from backends.contract import ConnectionFault, ReportFault, ignore_fault
from backends.http.connection_pool import RequestTemplate
from backends.http.responses import HEAD_LIMIT_BYTES, REPLY_LIMIT_BYTES, InvalidResponse, RawResponse

# Ends of a kept-alive connection, or of an HTTP/2 connection that the server closes.
ENDED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class OwnTlsFailed(httpx.ConnectError):
    """Failure of the TLS of a connection itself, not of the tunnel in it."""


class ConnectionTrace:
    """Events of the connection that a request opens or takes, by httpx's names.

    has_opened: the request has opened it rather than taken an idle one.
    """

    def __init__(self) -> None:
        self.has_opened = False
        self._last = ""
        # Connection to a proxy whose handshake has not succeeded: httpx leaves it open if it fails.
        self._unfinished: Any = None

    async def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        """Note an event."""
        self._last = event
        if event in {"connection.connect_tcp.started", "socks.connect_tcp.started"}:
            self.has_opened = True
        elif event == "socks.connect_tcp.complete":
            self._unfinished = info["return_value"]
        elif event == "socks.setup_socks5_connection.complete":
            self._unfinished = None

    def explained(self, error: Exception) -> httpx.TransportError | None:
        """Return the error of a failed request in place of one that says less, None to keep that."""
        if isinstance(error, httpx.ConnectError):
            return OwnTlsFailed(str(error)) if self._last == "connection.start_tls.failed" else None
        if self._unfinished is None or isinstance(error, httpx.HTTPError):
            return None
        # The library of SOCKS has exceptions of its own for bytes that are not SOCKS.
        return httpx.ProxyError("it does not answer as a SOCKS proxy")

    async def close(self) -> None:
        """Close what httpx leaves open."""
        stream, self._unfinished = self._unfinished, None
        if stream is not None:
            await stream.aclose()


class HttpxTransport:
    """Adapter from httpx transports to `Transport`.

    open_transport: returns a new one. connect_timeout_s: limit for opening one connection. report: called
    with each fault. reply_bytes_max: bound on the body of a response.
    """

    def __init__(
        self,
        open_transport: Callable[[], httpx.AsyncBaseTransport],
        connect_timeout_s: float | None = None,
        report: ReportFault = ignore_fault,
        reply_bytes_max: int = REPLY_LIMIT_BYTES,
    ) -> None:
        self._open_transport = open_transport
        self._timeouts = dict.fromkeys(("read", "write", "pool")) | {"connect": connect_timeout_s}
        self._report = report
        self._reply_bytes_max = reply_bytes_max
        self._current: httpx.AsyncBaseTransport | None = None
        # Requests in flight on each transport: one that was left is closed after the last of them.
        self._in_flight: dict[httpx.AsyncBaseTransport, int] = {}

    async def send(
        self,
        template: RequestTemplate,
        extra: Sequence[tuple[bytes, bytes]],
        body: bytes,
        reply_bytes_max: int | None = None,
    ) -> RawResponse:
        """Send a request and return the complete response.

        Raises: the exceptions of httpx's transports.
        """
        transport = self._current = self._current or self._open_transport()
        bound = min(self._reply_bytes_max, reply_bytes_max or self._reply_bytes_max)
        headers = [*template.headers, *extra]
        if body or template.method == "POST":
            headers.append((b"content-length", b"%d" % len(body)))
        self._in_flight[transport] = self._in_flight.get(transport, 0) + 1
        try:
            await self._close_left()
            return await self._exchange(transport, template, headers, body, bound)
        finally:
            self._in_flight[transport] -= 1

    async def _exchange(
        self,
        transport: httpx.AsyncBaseTransport,
        template: RequestTemplate,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        bound: int,
    ) -> RawResponse:
        """Send a request, and again if its kept-alive connection ended without an answer to it."""
        trace = ConnectionTrace()
        extensions = {"timeout": self._timeouts, "trace": trace}

        async def attempt() -> httpx.Response:
            stream = httpx.ByteStream(body)
            request = httpx.Request(
                template.method, template.url, headers=headers, stream=stream, extensions=extensions
            )
            try:
                return await transport.handle_async_request(request)
            except Exception as error:
                if (explained := trace.explained(error)) is not None:
                    raise explained from error
                raise
            finally:
                await trace.close()

        try:
            response = await attempt()
        except ENDED:
            # The events of a mock transport never come, and it has no connections.
            if trace.has_opened or not isinstance(transport, httpx.AsyncHTTPTransport):
                raise
            self._report(ConnectionFault("stale"))
            response = await attempt()
        return await _read(response, bound)

    def drop_idle(self) -> None:
        """Leave all connections: later requests open new ones, and those in flight finish on theirs."""
        self._current = None

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail."""
        for transport in list(self._in_flight):
            await transport.aclose()

    async def _close_left(self) -> None:
        # Looked for again after each: another request may close some meanwhile.
        while (left := self._one_left()) is not None:
            del self._in_flight[left]
            await left.aclose()

    def _one_left(self) -> httpx.AsyncBaseTransport | None:
        counts = self._in_flight.items()
        return next((other for other, count in counts if not count and other is not self._current), None)


async def _read(response: httpx.Response, bound: int) -> RawResponse:
    """Read a response within a bound on its body. Raises: InvalidResponse."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    chunks, size = [], 0
    try:
        if sum(len(name) + len(value) for name, value in response.headers.raw) > HEAD_LIMIT_BYTES:
            raise InvalidResponse("the reply's head is too large")
        async for chunk in response.stream:
            size += len(chunk)
            if size > bound:
                raise InvalidResponse(f"the reply is too large: more than {bound} bytes")
            chunks.append(chunk)
    finally:
        # Shielded: a connection whose request is cancelled while it is closed would stay in httpx's pool.
        await asyncio.shield(response.stream.aclose())
    return RawResponse(response.status_code, response.headers.raw, b"".join(chunks))
