"""The one HTTP client, and the one translation of its exceptions.

Rule: no other module but `connection_pool.py` imports httpx; what leaves here is bytes or a BackendError.
URLs, headers and failures are httpx's, and any transport of its will do. Its client is left out: cookies,
redirects and proxies are what must not happen here, and it costs as much as the request itself.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import httpx
import msgspec

from backends.connection_pool import (
    ConnectionPool,
    RawResponse,
    RequestTemplate,
    Transport,
    request_template,
    tcp_connector,
    unix_connector,
)
from backends.contract import TlsFiles
from backends.errors import AttemptTimedOut, BackendError, ConnectionLost, ReplicaFailed, ReplicaUnavailable
from backends.tracing import carrier

# A replica that does not take a connection in this time is as good as gone.
CONNECT_TIMEOUT_S = 3.0
# What is shorter in a header is a word of the field's, such as Bearer.
SECRET_CHARACTERS_MIN = 8
# How long a connection that nobody uses is kept.
IDLE_S = 30.0
# For servers on uvicorn and the like, which drop theirs after 5 s, and with it a call that comes just then.
SHORT_IDLE_S = 4.0


def countdown(timeout_s: float) -> Callable[[], float]:
    """What is left of a time, for several requests in a row; used up, the next one ends as TimedOut."""
    ends_s = time.monotonic() + timeout_s
    return lambda: max(0.0, ends_s - time.monotonic())


class UpstreamResponse(msgspec.Struct, frozen=True):
    """One complete HTTP answer, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class UpstreamClient:
    """Requests to one base URL, or to one Unix socket, over kept-alive connections."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        socket_path: str | None = None,
        tls: TlsFiles | None = None,
        ip: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # Uncompressed: on a short way it is faster, and a small reply cannot become a huge one.
        self._headers = {"accept-encoding": "identity", **(headers or {})}
        shown = [part for value in (headers or {}).values() for part in (value, *value.split())]
        self._secrets = [part.encode() for part in shown if len(part) >= SECRET_CHARACTERS_MIN]
        self._targets: dict[tuple[str, str, str | None], RequestTemplate] = {}
        self._transport: Transport | None = None if transport is None else OverHttpx(transport)
        self._open = partial(_transport, self.base_url, socket_path, tls or TlsFiles(), idle_s, ip)

    async def get(self, path: str, timeout_s: float) -> UpstreamResponse:
        """Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed."""
        return await self._send("GET", path, b"", None, timeout_s)

    async def post(
        self, path: str, body: bytes, timeout_s: float, content_type: str = "application/json"
    ) -> UpstreamResponse:
        """Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed."""
        return await self._send("POST", path, body, content_type, timeout_s)

    async def _send(
        self, method: str, path: str, body: bytes, content_type: str | None, timeout_s: float
    ) -> UpstreamResponse:
        try:
            async with asyncio.timeout(timeout_s):
                if self._transport is None:
                    self._transport = self._open()
                target, traced = self._target(method, path, content_type), carrier.get()
                more = () if traced is None else httpx.Headers(traced.headers).raw
                return self._answer(await self._transport.ask(target, more, body))
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _translated(error, timeout_s) from error

    def _answer(self, arrived: RawResponse) -> UpstreamResponse:
        """Raises: ReplicaFailed."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in arrived.headers}
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ReplicaFailed("the reply is compressed, which was not asked for")
        body = arrived.body if arrived.status == 200 else self._without_secrets(arrived.body)
        return UpstreamResponse(arrived.status, headers, body)

    def _without_secrets(self, body: bytes) -> bytes:
        """What a server says of a failure may reach a caller: not with what the gateway shows it."""
        for secret in self._secrets:
            body = body.replace(secret, b"...")
        return body

    def _target(self, method: str, path: str, content_type: str | None) -> RequestTemplate:
        """Where to, and the headers for it: made once."""
        known = self._targets.get((method, path, content_type))
        if known is None:
            url = httpx.URL(self.base_url + path)
            typed = {} if content_type is None else {"content-type": content_type}
            host = {"host": url.netloc.decode()}
            known = request_template(method, url, httpx.Headers({**host, **self._headers, **typed}))
            self._targets[method, path, content_type] = known
        return known

    async def aclose(self) -> None:
        """Close the pool."""
        if self._transport is not None:
            await self._transport.aclose()


class OverHttpx:
    """Any transport of httpx as this door's."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def ask(
        self, target: RequestTemplate, more: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RawResponse:
        """A whole answer. Raises: what the transport raises."""
        headers = [*target.headers, *more]
        request = httpx.Request(target.method, target.url, headers=headers, stream=httpx.ByteStream(body))
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        chunks = [chunk async for chunk in response.stream]
        return RawResponse(response.status_code, response.headers.raw, b"".join(chunks))

    async def aclose(self) -> None:
        """Close the transport."""
        await self._transport.aclose()


def _translated(error: Exception, timeout_s: float) -> BackendError:
    """Every exception of httpx, the network and the clock as a BackendError."""
    match error:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            return ReplicaUnavailable(_unreached(error.__cause__))
        case TimeoutError() | httpx.TimeoutException():
            return AttemptTimedOut(f"no answer within {timeout_s:.1f} s")
        case httpx.DecodingError() | httpx.InvalidURL() | ValueError():
            return ReplicaFailed("the reply is not valid HTTP")
    return ConnectionLost("the connection broke before the reply was complete")


def _unreached(cause: BaseException | None) -> str:
    match cause:
        case ssl.SSLCertVerificationError():
            return "the replica's certificate is not trusted"
        case ssl.SSLError():
            return "the replica takes no TLS connection"
    return "no connection to the replica"


def _transport(
    base_url: str, socket_path: str | None, tls: TlsFiles, idle_s: float, ip: str | None
) -> Transport:
    way = (
        unix_connector(socket_path)
        if socket_path
        else tcp_connector(httpx.URL(base_url), _tls_context(tls), ip)
    )
    return ConnectionPool(way, CONNECT_TIMEOUT_S, idle_s)


@cache
def _tls_context(tls: TlsFiles) -> ssl.SSLContext:
    # Reading the trust store takes tens of milliseconds; once a process is enough.
    context = httpx.create_ssl_context() if tls.ca is None else ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.private_key)
    return context
