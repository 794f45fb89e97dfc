"""HTTP client of all adapters: times of connections, and the translation of HTTP exceptions to BackendError.

Rule: only this module and its transport (`connection_pool`, `connection`, `responses`) import httpx.
Callers receive bytes or a BackendError.
URLs, headers and exceptions are httpx's, and any httpx transport can be used. httpx's client is not used:
its cookies, redirects and proxies are unwanted here, and it costs as much CPU as the request itself.
"""

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import httpx
import msgspec

from backends.contract import ReplicaSpec, ReportFault, TlsFiles, ignore_fault
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ReplicaFailed,
    ReplicaUnavailable,
)
from backends.http.connection import SlowHead
from backends.http.connection_pool import (
    ConnectionPool,
    PoolOptions,
    RequestTemplate,
    Transport,
    request_template,
    tcp_connector,
    unix_connector,
)
from backends.http.responses import REPLY_LIMIT_BYTES, InvalidResponse, RawResponse
from backends.tracing import carrier

# A replica that accepts no connection within this time is treated as unavailable.
CONNECT_TIMEOUT_S = 3.0
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


def secrets_of(headers: Mapping[str, str]) -> list[bytes]:
    """Return the parts of header values that may be credentials."""
    parts = [part for value in headers.values() for part in (value, *value.split())]
    return [part.encode() for part in parts if len(part) >= SECRET_CHARACTERS_MIN]


def mask_secrets(text: bytes, secrets: Sequence[bytes]) -> bytes:
    """Mask the gateway's credentials in an upstream's words, because they may reach a caller."""
    for secret in secrets:
        text = text.replace(secret, b"...")
    return text


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


class UpstreamClient:
    """Client of one base URL, or of one Unix socket, over kept-alive connections."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        options: ConnectionOptions | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # Uncompressed replies are faster on a local network, and a small reply cannot expand to a huge one.
        self._headers = {"accept-encoding": "identity", **(headers or {})}
        self._secrets = secrets_of(headers or {})
        # Only the gateway's own engine is behind a socket.
        self._is_trusted = options is not None and options.socket_path is not None
        self._templates: dict[tuple[str, str, str | None], RequestTemplate] = {}
        self._transport: Transport | None = None if transport is None else HttpxTransport(transport)
        self._open = partial(_open_pool, self.base_url, options or ConnectionOptions())

    async def get(self, path: str, timeout_s: float) -> UpstreamResponse:
        """Send a GET request and return the complete response.

        Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed.
        """
        response = await self._send("GET", path, b"", None, timeout_s, DESCRIPTION_BYTES_MAX)
        if self._is_large(response):
            if len(response.body) > DESCRIPTION_BYTES_MAX:
                raise ReplicaFailed(f"its description is larger than {DESCRIPTION_BYTES_MAX} bytes")
            _check_values(response.body, None)
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
                response = self._response(await self._transport.send(template, extra, body, bytes_max))
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _translate(error, timeout_s) from error
        if response.status == 200:
            return response
        request = f"{method} {httpx.URL(self.base_url + path).path}"
        return msgspec.structs.replace(response, request=request)

    def _response(self, raw: RawResponse) -> UpstreamResponse:
        """Decode the headers and remove secrets from an error body.

        Raises: ReplicaFailed, if the body is compressed.
        """
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw.headers}
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ReplicaFailed("the reply is compressed, which was not asked for")
        body = raw.body if raw.status == 200 else mask_secrets(raw.body[:ERROR_BYTES_MAX], self._secrets)
        # JSON that an editor of Windows or an XML library wrote may begin with a byte order mark.
        return UpstreamResponse(raw.status, headers, body.removeprefix(BOM))

    def _template(self, method: str, path: str, content_type: str | None) -> RequestTemplate:
        """Return the request line and constant headers, built once per method, path and content type."""
        template = self._templates.get((method, path, content_type))
        if template is None:
            url = httpx.URL(self.base_url + path)
            typed = {} if content_type is None else {"content-type": content_type}
            host = {"host": url.netloc.decode()}
            template = request_template(method, url, httpx.Headers({**host, **self._headers, **typed}))
            self._templates[method, path, content_type] = template
        return template

    def drop_connections(self) -> None:
        """Close the connections that are idle, because one may hold the reply to another request."""
        if self._transport is not None:
            self._transport.drop_idle()

    async def aclose(self) -> None:
        """Close the connection pool."""
        if self._transport is not None:
            await self._transport.aclose()


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


class HttpxTransport:
    """Adapter from an httpx transport to this client's `Transport`."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(
        self,
        template: RequestTemplate,
        extra: Sequence[tuple[bytes, bytes]],
        body: bytes,
        reply_bytes_max: int | None = None,  # noqa: ARG002 - httpx reads whole bodies
    ) -> RawResponse:
        """Send a request and return the complete response.

        Raises: the exceptions of the httpx transport.
        """
        headers = [*template.headers, *extra]
        request = httpx.Request(template.method, template.url, headers=headers, stream=httpx.ByteStream(body))
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        chunks = [chunk async for chunk in response.stream]
        return RawResponse(response.status_code, response.headers.raw, b"".join(chunks))

    def drop_idle(self) -> None:
        """Do nothing: the httpx transport keeps its connections to itself."""

    async def aclose(self) -> None:
        """Close the httpx transport."""
        await self._transport.aclose()


def _translate(error: Exception, timeout_s: float) -> BackendError:
    """Convert an exception of httpx, the network or the clock to a BackendError."""
    match error:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            return ReplicaUnavailable(_connect_failure(error.__cause__))
        case SlowHead():
            return AttemptTimedOut(str(error))
        case InvalidResponse():
            return ReplicaFailed(str(error))
        case TimeoutError() | httpx.TimeoutException():
            return AttemptTimedOut(f"no answer within {timeout_s:.1f} s")
        case httpx.DecodingError() | httpx.InvalidURL() | ValueError():
            return ReplicaFailed("the reply is not valid HTTP")
    return ConnectionLost("the connection broke before the reply was complete")


def _connect_failure(cause: BaseException | None) -> str:
    match cause:
        case ssl.SSLCertVerificationError():
            return "the replica's certificate is not trusted"
        case ssl.SSLError():
            return "the replica takes no TLS connection"
        case socket.gaierror():
            return "no connection to the replica: its host name is not known"
        case OSError() if f"[Errno {errno.ECONNREFUSED}]" in str(cause):
            return "no connection to the replica: nothing listens at its port"
        case TimeoutError():
            return f"no connection to the replica within {CONNECT_TIMEOUT_S:.0f} s"
    return "no connection to the replica"


def _open_pool(base_url: str, options: ConnectionOptions) -> Transport:
    if options.socket_path:
        connector = unix_connector(options.socket_path)
    else:
        connector = tcp_connector(httpx.URL(base_url), _tls_context(options.tls), options.ip)
    # The engine keeps idle connections for longer than this client. One that breaks shows a crash, which the
    # request may have caused.
    resends = options.socket_path is None
    pool = PoolOptions(CONNECT_TIMEOUT_S, options.idle_s, resends, options.report, options.reply_bytes_max)
    return ConnectionPool(connector, pool)


@cache
def _tls_context(tls: TlsFiles) -> ssl.SSLContext:
    # Reading the trust store takes tens of milliseconds, therefore it is read once per process.
    context = httpx.create_ssl_context() if tls.ca is None else ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.private_key)
    return context


def trusted_authorities() -> bytes:
    """Return the certificates, in PEM format, that upstreams without a `ca` of their own are checked with."""
    certificates = _tls_context(TlsFiles()).get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode()
