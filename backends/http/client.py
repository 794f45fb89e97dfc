"""HTTP client of all adapters: its requests, their credentials and the bounds of replies.

Rule: only modules of this folder import httpx. Callers receive bytes or a BackendError.
URLs, headers and exceptions are httpx's, and any httpx transport can be used: `egress` uses httpx's own for
the APIs of vendors. httpx's client is not used: its cookies and redirects are unwanted here, and it costs as
much CPU as the request itself.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import httpx
import msgspec

from backends.contract import ReplicaSpec, ReportFault, TlsFiles, ignore_fault
from backends.contract.errors import ProxyRefused, ReplicaFailed
from backends.http.connection_pool import (
    ConnectionPool,
    PoolOptions,
    RequestTemplate,
    Transport,
    request_template,
    tcp_connector,
    unix_connector,
)
from backends.http.faults import CONNECT_TIMEOUT_S, REFUSED_BY_PROXY, translated
from backends.http.httpx_transport import HttpxTransport
from backends.http.responses import REPLY_LIMIT_BYTES, RawResponse
from backends.http.tls import tls_context
from backends.tracing import carrier

# Shorter parts of a header value are scheme words such as Bearer, not secrets.
SECRET_CHARACTERS_MIN = 8
# Lifetime of an idle connection.
IDLE_S = 30.0
# For uvicorn and similar servers: they close idle connections after 5 s, and a request sent at that moment
# would be lost.
SHORT_IDLE_S = 4.0


# Replies up to this size are decoded without a further check.
COUNTED_BYTES = 64 * 1024
# Of a reply to a GET: descriptions of a server and its metrics.
DESCRIPTION_BYTES_MAX = 4 * 1024 * 1024
ERROR_BYTES_MAX = 64 * 1024
BOM = b"\xef\xbb\xbf"
# A token each of 256 KiB of text is an object, and 2,048 vectors of 8,192 numbers are the largest batch.
REPLY_LISTS_MAX = 1_000_000
REPLY_VALUES_MAX = 20_000_000
# Of a reply that has one vector or one score for each input; the widest vectors in use have 16,384 numbers.
ROW_LISTS_MAX = 16
ROW_VALUES_MAX = 65_536
# Of as many numbers with all their digits, and spaces between them. Base64 is shorter.
NUMBER_BYTES_MAX = 32
ROW_BYTES_MAX = NUMBER_BYTES_MAX * ROW_VALUES_MAX
# Of a reply besides its numbers: names of fields, the usage, an error page.
REPLY_EXTRA_BYTES = 1024 * 1024
# Of requests whose constant parts are kept. Some paths have the id of a request, and come once.
TEMPLATES_MAX = 64


def secrets_of(headers: Mapping[str, str]) -> list[bytes]:
    """Return the parts of header values that may be credentials."""
    parts = [part for value in headers.values() for part in (value, *value.split())]
    return [part.encode() for part in parts if len(part) >= SECRET_CHARACTERS_MIN]


def mask_secrets(text: bytes, secrets: Sequence[bytes]) -> bytes:
    """Mask the gateway's credentials in an upstream's words, because they may reach a caller."""
    for secret in secrets:
        text = text.replace(secret, b"...")
    return text


def proxy_secrets(proxy: str | None) -> list[bytes]:
    """Return the password of a proxy's URL, and the credentials as they are sent."""
    if proxy is None:
        return []
    url = httpx.URL(proxy)
    if not url.password:
        return []
    sent = base64.b64encode(f"{url.username}:{url.password}".encode())
    return [url.password.encode(), sent]


def countdown(timeout_s: float) -> Callable[[], float]:
    """Return a function that reports the remaining seconds of a timeout shared by several requests.

    It returns 0 once the time is used up, and the next request then raises AttemptTimedOut.
    """
    deadline_s = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline_s - time.monotonic())


class UpstreamResponse(msgspec.Struct, frozen=True):
    """Complete HTTP response of any status.

    request: method and path that it answers, for messages; only of a status other than 200.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    request: str = ""


class OutgoingRequest(msgspec.Struct, frozen=True):
    """Request as it is sent, for a signature.

    url: absolute. headers: those that all such requests have, with lower-case names.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


class Authorizer(Protocol):
    """Credentials of each request, such as a token that expires or a signature."""

    async def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        """Return the headers to add to a request. Their values are masked in replies.

        Raises: BackendError.
        """

    def refused(self) -> None:
        """Forget what was kept, because the upstream answered with 401."""

    async def aclose(self) -> None:
        """Close the connections to an identity service."""


class ConnectionOptions(msgspec.Struct, frozen=True):
    """Settings of a client's connections.

    socket_path: a Unix socket to connect to instead of the base URL's host. ip: the one address to connect to
    if the host has several. idle_s: lifetime of an idle connection. report: called with each fault of a
    connection. reply_bytes_max: bound on the body of a response, of any status.
    """

    socket_path: str | None = None
    tls: TlsFiles = TlsFiles()
    ip: str | None = None
    idle_s: float = IDLE_S
    report: ReportFault = ignore_fault
    reply_bytes_max: int = REPLY_LIMIT_BYTES
    proxy: str | None = None


class UpstreamClient:
    """Client of one base URL, or of one Unix socket, over kept-alive connections."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        options: ConnectionOptions | None = None,
        *,
        transport: httpx.AsyncBaseTransport | Transport | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # Uncompressed replies are faster on a local network, and a small reply cannot expand to a huge one.
        self._headers = {"accept-encoding": "identity", **(headers or {})}
        options = options or ConnectionOptions()
        self._secrets = [*secrets_of(headers or {}), *proxy_secrets(options.proxy)]
        self._is_proxied = options.proxy is not None
        # Only the gateway's own engine is behind a socket.
        self._is_trusted = options.socket_path is not None
        self._authorizer = authorizer
        self._templates: dict[tuple[str, str, str | None], RequestTemplate] = {}
        self._open = partial(_open_pool, self.base_url, options)
        self._transport: Transport | None = (
            HttpxTransport(lambda: transport)
            if isinstance(transport, httpx.AsyncBaseTransport)
            else transport
        )

    async def get(
        self, path: str, timeout_s: float, rows: int | None = None, width: int | None = None
    ) -> UpstreamResponse:
        """Send a GET request and return the complete response.

        rows, width: as in `post`, of the reply to an earlier request; without them it is a description.

        Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed.
        """
        bytes_max = DESCRIPTION_BYTES_MAX if rows is None else reply_bytes_max(rows, width)
        response = await self._send("GET", path, b"", None, timeout_s, bytes_max)
        if self._is_large(response):
            if rows is None and len(response.body) > DESCRIPTION_BYTES_MAX:
                raise ReplicaFailed(f"its description is larger than {DESCRIPTION_BYTES_MAX} bytes")
            _check_values(response.body, rows)
        return response

    async def post(
        self,
        path: str,
        body: bytes,
        timeout_s: float,
        content_type: str = "application/json",
        rows: int | None = None,
        width: int | None = None,
    ) -> UpstreamResponse:
        """Send a POST request and return the complete response.

        rows: vectors or scores in a valid reply, which bound its size; None if their number is unknown.
        width: of the vectors, None if it is not known.

        Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed.
        """
        response = await self._send("POST", path, body, content_type, timeout_s, reply_bytes_max(rows, width))
        if self._is_large(response):
            _check_values(response.body, rows)
        return response

    def _is_large(self, response: UpstreamResponse) -> bool:
        return response.status == 200 and len(response.body) > COUNTED_BYTES and not self._is_trusted

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        content_type: str | None,
        timeout_s: float,
        bytes_max: int | None,
    ) -> UpstreamResponse:
        if self._is_trusted:
            bytes_max = None
        try:
            async with asyncio.timeout(timeout_s):
                if self._transport is None:
                    self._transport = self._open()
                template, trace = self._template(method, path, content_type), carrier.get()
                extra = () if trace is None else httpx.Headers(trace.headers).raw
                secrets: list[bytes] = []
                if self._authorizer is not None:
                    added = await self._authorized(template, body)
                    extra, secrets = [*extra, *httpx.Headers(added).raw], secrets_of(added)
                raw = await self._transport.send(template, extra, body, bytes_max)
                response = self._response(raw, secrets)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise translated(error, timeout_s, is_proxied=self._is_proxied) from error
        if response.status == 401 and self._authorizer is not None:
            self._authorizer.refused()
        if response.status == 407 and self._is_proxied:
            raise ProxyRefused(REFUSED_BY_PROXY)
        if response.status == 200:
            return response
        request = f"{method} {httpx.URL(self.base_url + path).path}"
        return msgspec.structs.replace(response, request=request)

    async def _authorized(self, template: RequestTemplate, body: bytes) -> Mapping[str, str]:
        """Return the headers that authorize a request. Raises: BackendError."""
        assert self._authorizer is not None
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in template.headers}
        return await self._authorizer.headers(
            OutgoingRequest(template.method, str(template.url), headers, body)
        )

    def _response(self, raw: RawResponse, secrets: Sequence[bytes]) -> UpstreamResponse:
        """Decode the headers and remove secrets from an error body. secrets: of this request only.

        Raises: ReplicaFailed, if the body is compressed.
        """
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw.headers}
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ReplicaFailed("the reply is compressed, which was not asked for")
        body = (
            raw.body
            if raw.status == 200
            else mask_secrets(raw.body[:ERROR_BYTES_MAX], [*self._secrets, *secrets])
        )
        # JSON that an editor of Windows or an XML library wrote may begin with a byte order mark.
        return UpstreamResponse(raw.status, headers, body.removeprefix(BOM))

    def _template(self, method: str, path: str, content_type: str | None) -> RequestTemplate:
        """Return the request line and constant headers, kept for each method, path and content type."""
        template = self._templates.get((method, path, content_type))
        if template is None:
            url = httpx.URL(self.base_url + path)
            typed = {} if content_type is None else {"content-type": content_type}
            host = {"host": url.netloc.decode()}
            template = request_template(method, url, httpx.Headers({**host, **self._headers, **typed}))
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            self._templates[method, path, content_type] = template
        return template

    def drop_connections(self) -> None:
        """Close the connections that are idle, because one may hold the reply to another request."""
        if self._transport is not None:
            self._transport.drop_idle()

    async def aclose(self) -> None:
        """Close the connections, and those that its credentials need."""
        if self._transport is not None:
            await self._transport.aclose()
        if self._authorizer is not None:
            await self._authorizer.aclose()


def reply_bytes_max(rows: int | None, width: int | None) -> int | None:
    """Return the bound on a reply that is read, None for that of all replies. rows, width: as in `post`."""
    if rows is None:
        return None
    row_bytes = ROW_BYTES_MAX if width is None else min(ROW_BYTES_MAX, width * NUMBER_BYTES_MAX)
    return REPLY_EXTRA_BYTES + row_bytes * (rows + 1)


def _check_values(body: bytes, rows: int | None) -> None:
    """Check that a reply can be decoded in little time and memory. rows: as in `UpstreamClient.post`.

    JSON is decoded on the event loop, where 50 MB of empty lists take nine seconds and gigabytes. Strings in
    replies are short, so that brackets and commas in them do not matter.

    Raises: ReplicaFailed.
    """
    lists_max, values_max = REPLY_LISTS_MAX, REPLY_VALUES_MAX
    if rows is not None:
        lists_max = min(lists_max, ROW_LISTS_MAX * (rows + 1))
        values_max = min(values_max, ROW_VALUES_MAX * (rows + 1))
        if len(body) > ROW_BYTES_MAX * (rows + 1):
            raise ReplicaFailed(f"the reply has more than {ROW_BYTES_MAX} bytes for each input")
    if body.count(b"[") + body.count(b"{") > lists_max:
        raise ReplicaFailed(f"the reply contains more than {lists_max} lists and objects")
    if body.count(b",") > values_max:
        raise ReplicaFailed(f"the reply contains more than {values_max} values")


def open_client(spec: ReplicaSpec, idle_s: float = IDLE_S) -> UpstreamClient:
    """Return a client of the replica; it connects on its first request."""
    options = ConnectionOptions(tls=spec.tls, ip=spec.ip, idle_s=idle_s, report=spec.report)
    return UpstreamClient(spec.address, spec.headers, options)


def _open_pool(base_url: str, options: ConnectionOptions) -> Transport:
    if options.socket_path:
        connector = unix_connector(options.socket_path)
    else:
        connector = tcp_connector(httpx.URL(base_url), tls_context(options.tls), options.ip)
    # The engine keeps idle connections for longer than this client. One that breaks shows a crash, which the
    # request may have caused.
    resends = options.socket_path is None
    pool = PoolOptions(CONNECT_TIMEOUT_S, options.idle_s, resends, options.report, options.reply_bytes_max)
    return ConnectionPool(connector, pool)
