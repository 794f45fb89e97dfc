"""The one HTTP client, and the one translation of its exceptions.

Rule: no other module imports httpx or aiohttp; what leaves here is bytes or a BackendError.
Requests and transports are httpx's, and the transport is aiohttp's: httpx's own pool carries a quarter of
the requests. httpx's client is left out: cookies, redirects and proxies are what must not happen here, and
it costs as much as the request itself.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache

import aiohttp
import httpx
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from httpx_aiohttp import AiohttpTransport

from backends.contract import Tls
from backends.errors import BackendError, Failed, Lost, TimedOut, Unavailable

# A replica that does not take a connection in this time is as good as gone.
CONNECT_TIMEOUT_S = 3.0
EXTENSIONS = {"timeout": {"connect": CONNECT_TIMEOUT_S, "read": None, "write": None, "pool": None}}
# How long a connection that nobody uses is kept.
IDLE_S = 30.0
# For servers on uvicorn and the like, which drop theirs after 5 s, and with it a call that comes just then.
SHORT_IDLE_S = 4.0
# The largest honest reply is 2,048 vectors of 8,192 JSON numbers; past this it is a fault.
REPLY_LIMIT_BYTES = 512 * 1024 * 1024


def countdown(timeout_s: float) -> Callable[[], float]:
    """What is left of a time, for several requests in a row; used up, the next one ends as TimedOut."""
    ends_s = time.monotonic() + timeout_s
    return lambda: max(0.0, ends_s - time.monotonic())


class Answer(msgspec.Struct, frozen=True):
    """One complete HTTP answer, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpDoor:
    """Requests to one base URL, or to one Unix socket, over kept-alive connections."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        socket_path: str | None = None,
        tls: Tls | None = None,
        ip: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # Uncompressed: on a short way it is faster, and a small reply cannot become a huge one.
        self._headers = {"accept-encoding": "identity", **(headers or {})}
        self._urls: dict[str, httpx.URL] = {}
        self._transport = transport or _transport(socket_path, _tls_context(tls or Tls()), idle_s, ip)

    async def get(self, path: str, timeout_s: float) -> Answer:
        """Raises: Unavailable, Lost, TimedOut, Failed."""
        return await self._send("GET", path, None, {}, timeout_s)

    async def post(
        self, path: str, body: bytes, timeout_s: float, content_type: str = "application/json"
    ) -> Answer:
        """Raises: Unavailable, Lost, TimedOut, Failed."""
        return await self._send("POST", path, body, {"content-type": content_type}, timeout_s)

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> Answer:
        url = self._urls.get(path)
        async with _translated(timeout_s):
            if url is None:
                url = self._urls[path] = httpx.URL(self.base_url + path)
            request = httpx.Request(
                method, url, headers=self._headers | headers, content=body, extensions=EXTENSIONS
            )
            response = await self._transport.handle_async_request(request)
            try:
                return Answer(response.status_code, response.headers, await _read(response))
            finally:
                await response.aclose()

    async def aclose(self) -> None:
        """Close the pool."""
        await self._transport.aclose()


async def _read(response: httpx.Response) -> bytes:
    chunks: list[bytes] = []
    size = 0
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise Failed("the reply is compressed, which was not asked for")
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        size += len(chunk)
        if size > REPLY_LIMIT_BYTES:
            raise Failed(f"the reply is larger than {REPLY_LIMIT_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


@asynccontextmanager
async def _translated(timeout_s: float) -> AsyncIterator[None]:
    """Turn every exception of httpx, aiohttp and the clock into a BackendError."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (httpx.ConnectTimeout, httpx.ConnectError) as error:
        # httpx-aiohttp calls a connection dropped between request and reply a ConnectTimeout too.
        raise _unreached_or_lost(error) from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise TimedOut(f"no answer within {timeout_s:.1f} s") from error
    except (httpx.TransportError, aiohttp.ClientError, OSError) as error:
        raise Lost("the connection broke before the reply was complete") from error
    except (httpx.DecodingError, httpx.InvalidURL, ValueError) as error:
        raise Failed("the reply is not valid HTTP") from error


def _unreached_or_lost(error: Exception) -> BackendError:
    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return Unavailable("the replica's certificate is not trusted")
    if isinstance(cause, aiohttp.ClientConnectorSSLError):
        return Unavailable("the replica takes no TLS connection")
    lost = isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not (
        isinstance(cause, aiohttp.ClientConnectorError)
    )
    if lost:
        return Lost("the connection broke before the reply was complete")
    return Unavailable("no connection to the replica")


def _transport(
    socket_path: str | None, context: ssl.SSLContext, idle_s: float, ip: str | None
) -> httpx.AsyncBaseTransport:
    def session() -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if socket_path is not None:
            connector = aiohttp.UnixConnector(path=socket_path, limit=0)
        else:
            resolver = None if ip is None else _Pinned(ip)
            connector = aiohttp.TCPConnector(
                limit=0, ssl=context, keepalive_timeout=idle_s, resolver=resolver
            )
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    transport: httpx.AsyncBaseTransport = AiohttpTransport(client=session, verify=context)
    return transport


class _Pinned(AbstractResolver):
    """Every name leads to one address; requests and certificates still speak of the name."""

    def __init__(self, ip: str) -> None:
        self._ip = ip

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        del family
        own = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=self._ip, port=port, family=own, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        """Nothing is open."""


@cache
def _tls_context(tls: Tls) -> ssl.SSLContext:
    # Reading the trust store takes tens of milliseconds; once a process is enough.
    context = httpx.create_ssl_context() if tls.ca is None else ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.private_key)
    return context
