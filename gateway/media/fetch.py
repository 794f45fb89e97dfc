"""Fetching of media whose addresses callers send. A refusal is a ValueError with its reason.

Rule: the connection goes to an IP address that was checked, never to a name that is resolved again. Requests
have no credentials and no cookies, use no proxy, and accept no compression.
"""

import asyncio
import math
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from backends.http.responses import InvalidResponse, RawResponse, ResponseReader
from backends.http.tls import trusted_authorities
from gateway.config.schema import FetchSettings
from gateway.media.addresses import Target, check_ips, is_ip, redirected, rules_of, target_of
from gateway.media.sources import Fetched

# From a host's name to IP addresses. Raises: OSError.
Resolve = Callable[[str], Awaitable[Sequence[str]]]
# Opens a connection to an IP address. Raises: OSError.
Connect = Callable[[str, Target], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

REDIRECTS_MAX = 3
REDIRECTED = frozenset({301, 302, 303, 307, 308})
# Of a host's addresses; each is tried until one accepts a connection.
IPS_MAX = 4
READ_BYTES = 64 * 1024
# Head and chunk headers, in addition to the body.
FRAMING_BYTES_MAX = 256 * 1024
# A resolver that hangs keeps its thread: these are no other work's.
RESOLVER_THREADS = 16


class ByteBudget:
    """Bytes that the fetches of one request may still read."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def spend(self, size: int) -> None:
        """Take bytes that were read. Raises: ValueError."""
        self.remaining -= size
        if self.remaining < 0:
            raise ValueError("with it the request's media have more bytes than `media.fetch.request_bytes`")


class Permits:
    """Bounded number of holders, of whom each tenant is only some. Tenants that hold none take no memory."""

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total = asyncio.Semaphore(total)
        self._per_tenant = per_tenant
        self._tenants: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a permit and hold it; the caller bounds the wait."""
        own = self._tenants.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        self._users[tenant] += 1
        try:
            # The tenant's permit first: its waiting requests take no permits from others.
            async with own, self._total:
                yield
        finally:
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._tenants[tenant]

    def __len__(self) -> int:
        """Return the number of tenants that hold or wait."""
        return len(self._tenants)


class Fetcher:
    """Client for media at addresses that `media.fetch` allows; one per worker."""

    def __init__(
        self, settings: FetchSettings, resolve: Resolve | None = None, connect: Connect | None = None
    ) -> None:
        self._settings = settings
        self._rules = rules_of(settings)
        self._resolve = resolve or Resolver()
        self._connect = connect or Connector(ca=settings.ca)
        self._permits = Permits(settings.in_flight, settings.in_flight_per_tenant)
        self._lookups = Permits(RESOLVER_THREADS, RESOLVER_THREADS // 8)
        self._unfinished: set[asyncio.Task[Sequence[str]]] = set()

    @property
    def addresses_max(self) -> int:
        """Most addresses of one request."""
        return self._settings.request_addresses

    async def fetch_all(self, urls: Sequence[str], tenant: str, timeout_s: float | None = None) -> Fetched:
        """Return the bytes at each address of one request. timeout_s: the caller's own, if it has one."""
        budget = self.budget()

        async def outcome(url: str) -> bytes | ValueError:
            try:
                return await self.fetch(url, tenant, budget, timeout_s)
            except ValueError as error:
                return error

        return dict(zip(urls, await asyncio.gather(*map(outcome, urls)), strict=True))

    def budget(self) -> ByteBudget:
        """Return the budget of one request."""
        return ByteBudget(self._settings.request_bytes)

    async def fetch(self, url: str, tenant: str, budget: ByteBudget, timeout_s: float | None = None) -> bytes:
        """Return the body at an address. timeout_s: as in `fetch_all`. Raises: ValueError with the reason."""
        target = target_of(url, self._rules)
        timeout_s = min(timeout_s or math.inf, self._settings.timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self._permits.hold(tenant):
                return await self._follow(target, tenant, budget)
        except TimeoutError as error:
            raise ValueError(f"it was not fetched within {timeout_s:g} s") from error

    async def _follow(self, target: Target, tenant: str, budget: ByteBudget) -> bytes:
        """Return the body behind some redirects. Raises: ValueError."""
        for _ in range(REDIRECTS_MAX + 1):
            response = await self._request(target, tenant, budget)
            if response.status not in REDIRECTED:
                return _body_of(response)
            target = redirected(target, _header(response, b"location"), self._rules)
        raise ValueError(f"it was moved more than {REDIRECTS_MAX} times")

    async def _request(self, target: Target, tenant: str, budget: ByteBudget) -> RawResponse:
        """Send one request and return the response. Raises: ValueError."""
        reader, writer = await self._open(target, tenant)
        try:
            writer.write(_head_of(target))
            return await self._read(reader, budget)
        except InvalidResponse as error:
            raise ValueError(f"its host sent no valid HTTP: {error}") from error
        except OSError as error:
            raise ValueError("the connection to its host broke") from error
        finally:
            # Neither a farewell of TLS nor unsent data is waited for.
            writer.transport.abort()

    async def _look_up(self, host: str, tenant: str) -> Sequence[str]:
        """Return the addresses of a host.

        A lookup cannot be interrupted: its tenant holds a permit until it ends, also after a timeout.
        Raises: OSError.
        """
        if is_ip(host):
            return [host]
        permit = AsyncExitStack()
        await permit.enter_async_context(self._lookups.hold(tenant))

        async def finish() -> Sequence[str]:
            async with permit:
                return await self._resolve(host)

        lookup = asyncio.create_task(finish())
        self._unfinished.add(lookup)
        lookup.add_done_callback(self._forget)
        return await asyncio.shield(lookup)

    def _forget(self, lookup: "asyncio.Task[Sequence[str]]") -> None:
        self._unfinished.discard(lookup)
        if not lookup.cancelled():
            # Otherwise asyncio would log the error of a lookup whose request timed out.
            lookup.exception()

    async def _open(self, target: Target, tenant: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a checked IP address of the host. Raises: ValueError."""
        try:
            found = await self._look_up(target.host, tenant)
        except (OSError, UnicodeError) as error:
            raise ValueError("its host is not known") from error
        check_ips(found, self._rules.private)
        failure: OSError | None = None
        for ip in found[:IPS_MAX]:
            try:
                return await self._connect(ip, target)
            except ssl.SSLError as error:
                raise ValueError("its host has no certificate that is trusted") from error
            except OSError as error:
                failure = error
        raise ValueError("its host accepts no connection") from failure

    async def _read(self, reader: asyncio.StreamReader, budget: ByteBudget) -> RawResponse:
        """Read one response. Raises: ValueError, InvalidResponse, OSError."""
        limit = self._settings.item_bytes
        parser, size = ResponseReader(), 0
        try:
            while data := await reader.read(READ_BYTES):
                size += len(data)
                budget.spend(len(data))
                response = parser.feed(data)
                if response is not None and len(response.body) <= limit:
                    return response
                if response is not None or size > limit + FRAMING_BYTES_MAX:
                    raise ValueError(f"it has more bytes than `media.fetch.item_bytes`, {limit}")
            return _checked_end(parser.finish(), limit)
        finally:
            parser.close()


class Resolver:
    """The system's resolver, on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, "media-resolver")

    async def __call__(self, host: str) -> Sequence[str]:
        """Return the addresses of a host. Raises: OSError."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _resolved, host)
        return list(dict.fromkeys(found))


class Connector:
    """Opener of TCP connections to IP addresses; TLS checks the certificate for the host's name.

    ca: path of trusted authorities in PEM format; None trusts those of upstreams.
    """

    def __init__(self, context: ssl.SSLContext | None = None, ca: str | None = None) -> None:
        self._context = context
        self._ca = ca

    async def __call__(self, ip: str, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection. Raises: OSError."""
        if target.scheme == "http":
            return await asyncio.open_connection(ip, target.port, limit=READ_BYTES)
        if self._context is None:
            # Reading the trust store takes tens of milliseconds.
            self._context = await asyncio.to_thread(_trusting_context, self._ca)
        return await asyncio.open_connection(
            ip, target.port, limit=READ_BYTES, ssl=self._context, server_hostname=target.host
        )


def _trusting_context(ca: str | None) -> ssl.SSLContext:
    if ca is not None:
        return ssl.create_default_context(cafile=ca)
    return ssl.create_default_context(cadata=trusted_authorities().decode())


def _resolved(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def _head_of(target: Target) -> bytes:
    return (
        f"GET {target.path} HTTP/1.1\r\nhost: {target.authority}\r\naccept: image/*, audio/*\r\n"
        "accept-encoding: identity\r\nuser-agent: embedding-gateway\r\nconnection: close\r\n\r\n"
    ).encode("ascii")


def _body_of(response: RawResponse) -> bytes:
    """Return the body of a complete response. Raises: ValueError."""
    if response.status != 200:
        raise ValueError(f"its host answered with status {response.status}")
    if _header(response, b"content-encoding").strip().lower() not in ("", "identity"):
        raise ValueError("its host sent it compressed, which was not asked for")
    return response.body


def _header(response: RawResponse, name: bytes) -> str:
    """Return the first header of a name, or an empty text."""
    values = [value for key, value in response.headers if key.lower() == name]
    return values[0].decode("latin-1") if values else ""


def _checked_end(response: RawResponse | None, limit: int) -> RawResponse:
    """Return a response that ended with its connection. Raises: ValueError."""
    if response is None:
        raise ValueError("the connection to its host broke")
    if len(response.body) > limit:
        raise ValueError(f"it has more bytes than `media.fetch.item_bytes`, {limit}")
    return response
