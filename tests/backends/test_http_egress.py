"""Requests to vendors' APIs: through real proxies, over HTTP/2, with credentials of each request."""

import asyncio
import base64
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from backends.contract import Embed, ReplicaSpec, TlsFiles
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialRefused,
    ProxyRefused,
    ReplicaFailed,
    ReplicaUnavailable,
)
from backends.http.client import ConnectionOptions, OutgoingRequest, UpstreamClient
from backends.http.credentials import AccessToken, BearerToken, TokenSource
from backends.http.egress import open_egress, proxy_of
from backends.http.httpx_transport import HttpxTransport
from backends.http.tls import tls_context
from backends.openai.adapter import open_replica
from backends.openai.settings import ApiSettings
from tests.backends.test_connect_failures import closed_port
from tests.fakes.hooks import until
from tests.fakes.hosted_api import FakeHostedApi
from tests.fakes.http_servers import HEAD, OK, ScriptedServer, close, stay_silent
from tests.fakes.proxies import (
    KINDS,
    PASSWORD,
    TUNNEL_WORDS,
    USER,
    ProxyKind,
    program_of,
    running_proxy,
    wait_for_port,
)
from tests.fakes.threaded import serve_in_thread
from tests.processes.tls_files import Authority
from tests.quotas.redis_server import free_port
from tests.waiting import PATIENCE_S

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> ProxyKind:
    """Return the kind of a proxy that is installed."""
    if program_of(request.param) is None:
        pytest.skip(f"no {request.param} here")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def vendor(authority: Authority) -> Iterator[tuple[FakeHostedApi, str]]:
    """Serve Voyage's API over TLS, and yield it with its address."""
    api = FakeHostedApi("voyage")
    api.api_key = "vendor-key-1234"
    with serve_in_thread(api, authority.sign("vendor")) as address:
        yield api, address


def spec_of(address: str, authority: Authority, proxy: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        f"{address}/v1",
        "voyage-3",
        {"authorization": "Bearer vendor-key-1234"},
        TlsFiles(str(authority.ca)),
        settings=ApiSettings("voyage", task="embed"),
        proxy=proxy,
    )


def with_user(url: str, password: str = PASSWORD) -> str:
    return url.replace("://", f"://{USER}:{password}@")


# --- through real proxies


@pytest.mark.parametrize("has_users", [False, True], ids=["open", "users"])
async def test_a_vendor_is_called_through_a_tunnel(
    kind: ProxyKind,
    has_users: bool,
    vendor: tuple[FakeHostedApi, str],
    authority: Authority,
) -> None:
    api, address = vendor
    with running_proxy(kind, has_users=has_users, authority=authority) as (url, log):
        backend = open_replica(spec_of(address, authority, with_user(url) if has_users else url))
        found = await backend.describe(PATIENCE_S)
        reply = await backend.run(Embed(("a", "b")), PATIENCE_S)
        await backend.aclose()

        await until(lambda: TUNNEL_WORDS.get(kind, "CONNECT") in log.read_text())
    assert found.metered
    assert 2 == len(reply.vectors)
    assert ["a", "b"] == api.requests[-1][1]["input"]
    # The tunnel hides the credentials of the proxy from the vendor.
    assert all("proxy-authorization" not in headers for headers in api.headers)


@pytest.mark.parametrize("password", [None, "wrong-password"])
async def test_a_proxy_that_refuses_its_user_is_named(
    kind: ProxyKind,
    password: str | None,
    vendor: tuple[FakeHostedApi, str],
    authority: Authority,
) -> None:
    with running_proxy(kind, has_users=True, authority=authority) as (url, _):
        backend = open_replica(spec_of(vendor[1], authority, with_user(url, password) if password else url))
        with pytest.raises(ProxyRefused) as caught:
            await backend.describe(PATIENCE_S)
        await backend.aclose()

    assert "the proxy refused the credentials of the gateway" in caught.value.message
    assert "wrong-password" not in caught.value.explanation
    assert [] == vendor[0].headers


async def test_a_proxy_that_cannot_connect_is_named(kind: ProxyKind, authority: Authority) -> None:
    with running_proxy(kind, authority=authority) as (url, _):
        client = open_egress(spec_of(f"https://127.0.0.1:{closed_port()}", authority, url))
        reason = "connection refused" if kind == "microsocks" else "status 50"
        with pytest.raises(
            ReplicaUnavailable, match=f"the proxy opened no connection to the upstream: {reason}"
        ):
            await client.get("/models", PATIENCE_S)
        await client.aclose()


async def test_plain_http_goes_through_a_proxy_too(kind: ProxyKind, authority: Authority) -> None:
    with (
        serve_in_thread(FakeHostedApi("voyage")) as address,
        running_proxy(kind, has_users=True, authority=authority) as (url, log),
    ):
        client = open_egress(spec_of(address, authority, with_user(url)))
        refused = open_egress(spec_of(address, authority, url))
        body = b'{"model": "m", "input": ["a"]}'

        assert 200 == (await client.post("/embeddings", body, PATIENCE_S)).status
        # tinyproxy may break the connection before its answer is read.
        with pytest.raises(BackendError if kind == "tinyproxy" else ReplicaUnavailable):
            await refused.post("/embeddings", body, PATIENCE_S)
        await client.aclose()
        await refused.aclose()
        await until(lambda: TUNNEL_WORDS.get(kind, "POST") in log.read_text())


async def test_a_certificate_of_another_authority_is_refused_through_a_tunnel(
    vendor: tuple[FakeHostedApi, str], tmp_path: Path
) -> None:
    kind = next((kind for kind in KINDS if program_of(kind)), None)
    if kind is None:
        pytest.skip("no proxy here")
    with running_proxy(kind) as (url, _):
        client = open_egress(spec_of(vendor[1], Authority(tmp_path / "other"), url))
        with pytest.raises(ReplicaUnavailable, match="the replica's certificate is not trusted"):
            await client.get("/models", PATIENCE_S)
        await client.aclose()


@pytest.mark.parametrize("scheme", ["http", "https", "socks5"])
async def test_the_certificate_at_fault_is_named(
    scheme: str, vendor: tuple[FakeHostedApi, str], authority: Authority, tmp_path: Path
) -> None:
    kinds: dict[str, ProxyKind] = {"http": "squid", "https": "squid-tls", "socks5": "microsocks"}
    kind, other = kinds[scheme], Authority(tmp_path / "other")
    if program_of(kind) is None:
        pytest.skip(f"no {kind} here")
    # Of a proxy of HTTPS the certificate of the proxy, else that of the replica.
    with running_proxy(kind, authority=authority) as (url, _):
        client = open_egress(spec_of(vendor[1], other, url))
        peer = "proxy" if scheme == "https" else "replica"
        with pytest.raises(ReplicaUnavailable, match=f"the {peer}'s certificate is not trusted"):
            await client.get("/models", PATIENCE_S)
        await client.aclose()
    if scheme != "https":
        return
    with running_proxy(kind, authority=other) as (url, _), serve_in_thread(vendor[0]) as plain:
        # TLS begins in the tunnel, to a port without it.
        secure = plain.replace("http://", "https://")
        client = open_egress(spec_of(secure, other, url))
        with pytest.raises(ReplicaUnavailable, match="the replica takes no TLS connection"):
            await client.get("/models", PATIENCE_S)
        await client.aclose()


# Answers of a server to the bytes of a client of SOCKS, and the reason that is shown.
HELLO, OPENED = b"\x05\x00", b"\x05\x00\x00\x01" + bytes(6)
ODD_PROXIES: dict[str, tuple[tuple[bytes, ...], type[BackendError], str]] = {
    "HTTP": ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), ReplicaUnavailable, "does not answer as a SOCKS proxy"),
    "ends at once": ((b"",), ReplicaUnavailable, "does not answer as a SOCKS proxy"),
    "ends later": ((HELLO, b""), ReplicaUnavailable, "does not answer as a SOCKS proxy"),
    "cuts its answer": ((HELLO, OPENED[:5]), ReplicaUnavailable, "does not answer as a SOCKS proxy"),
    "wants a password": ((b"\x05\xff",), ProxyRefused, "the proxy refused the credentials"),
    "has a rule": ((HELLO, b"\x05\x02" + OPENED[2:]), ProxyRefused, "connection not allowed by ruleset"),
    "is silent": ((HELLO,), AttemptTimedOut, "no answer within"),
    "opens and ends": ((HELLO, OPENED, b""), ConnectionLost, "the connection broke"),
}


@pytest.mark.parametrize("name", ODD_PROXIES)
async def test_an_odd_proxy_of_socks_is_one_error_and_no_second_request(name: str) -> None:
    answers, error, words = ODD_PROXIES[name]
    connections: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        for data in answers:
            await reader.read(1000)
            writer.write(data)
        if name == "is silent":
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    spec = ReplicaSpec("http://upstream.test/v1", proxy=f"socks5h://127.0.0.1:{port}")
    client = open_egress(spec)
    with pytest.raises(error, match=words):
        await client.post("/embeddings", b"{}", 0.3 if name == "is silent" else PATIENCE_S)
    await client.aclose()
    server.close()
    for writer in connections:
        writer.close()

    assert 1 == len(connections)


async def test_a_proxy_that_takes_no_tls_is_named(authority: Authority) -> None:
    async with ScriptedServer(close) as server:
        port = server.client.base_url.rpartition(":")[2]
        client = open_egress(spec_of("https://a.test", authority, f"https://127.0.0.1:{port}"))
        with pytest.raises(
            ReplicaUnavailable, match=r"the proxy takes no TLS connection|connection to the proxy"
        ):
            await client.get("/models", PATIENCE_S)
        await client.aclose()


async def test_a_proxy_that_is_not_there(authority: Authority) -> None:
    client = open_egress(spec_of("https://a.test", authority, f"http://127.0.0.1:{closed_port()}"))
    with pytest.raises(ReplicaUnavailable, match="no connection to the proxy: nothing listens at its port"):
        await client.get("/models", PATIENCE_S)
    await client.aclose()


# --- which proxy


@pytest.mark.parametrize(
    ("environment", "address", "configured", "expected"),
    [
        ({}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1"}, "https://api.test", None, "http://p:1"),
        ({"https_proxy": "p:1"}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "http://api.test", None, None),
        ({"HTTP_PROXY": "http://p:1"}, "http://api.test", None, "http://p:1"),
        ({"ALL_PROXY": "socks5://p:1"}, "https://api.test", None, "socks5://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.test"}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "test"}, "https://api.test/v1", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.test:8443"}, "https://api.test:8443", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "pi.test"}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.test:443"}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.test:80"}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".test"}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*.test"}, "https://api.test", None, None),
        (
            {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*.api.test, other"},
            "https://pi.test",
            None,
            "http://p:1",
        ),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "https://10.1.2.3", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "https://11.1.2.3", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "[::1]"}, "https://[::1]:8443", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "[::1]:8443"}, "https://[::1]:8443", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "[::1]:8443"}, "https://[::1]", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "fd00::/8, x"}, "https://[fd00::2]", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "localhost, *"}, "https://api.test", None, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.test:²"}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": f"a:{'9' * 5000}"}, "https://a", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": ""}, "https://api.test", None, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "https://api.test", "none", None),
        ({"NO_PROXY": "*"}, "https://api.test", "http://u:p@q:2", "http://u:p@q:2"),
    ],
)
def test_which_proxy_is_used(
    environment: dict[str, str],
    address: str,
    configured: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert expected == proxy_of(address, configured)


@pytest.mark.parametrize("proxy", ["ftp://p:1", "http://[::", "://", "http://", "http://p:port"])
async def test_a_proxy_of_the_environment_that_is_no_address_is_named(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    client = open_egress(ReplicaSpec("https://api.test"))
    with pytest.raises(ReplicaUnavailable, match=r"the environment's proxy .* HTTPS_PROXY"):
        await client.get("/models", PATIENCE_S)
    await client.aclose()


@pytest.mark.parametrize(("kind_", "proxied"), [("openai", False), ("voyage", True)])
async def test_the_environment_applies_to_vendors_only(
    kind_: Any, proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{closed_port()}")
    with serve_in_thread(FakeHostedApi("voyage")) as address:
        spec = ReplicaSpec(f"{address}/v1", "m", settings=ApiSettings(kind_, task="embed"))
        direct, own = open_replica(msgspec.structs.replace(spec, proxy="none")), open_replica(spec)
        assert 8 == (await direct.describe(PATIENCE_S)).dimensions
        if proxied:
            with pytest.raises(ReplicaUnavailable, match="no connection to the proxy"):
                await own.describe(PATIENCE_S)
        else:
            assert 8 == (await own.describe(PATIENCE_S)).dimensions
        await direct.aclose()
        await own.aclose()


# --- bounds of the own pool, over httpx's transport


def over_httpx(server: ScriptedServer, reply_bytes_max: int = 1000) -> UpstreamClient:
    """Return a client of a scripted server over httpx's transport."""
    context = tls_context(TlsFiles(), "httpx")
    transport = HttpxTransport(
        lambda: httpx.AsyncHTTPTransport(context), 3.0, server.faults.append, reply_bytes_max
    )
    return UpstreamClient(server.client.base_url, transport=transport)


async def test_a_reply_is_bounded_while_it_is_read() -> None:
    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"100\r\n%b\r\n" % (b"x" * 256))
            await writer.drain()

    async with ScriptedServer(flood) as server:
        client = over_httpx(server)
        with pytest.raises(ReplicaFailed, match="the reply is too large: more than 1000 bytes"):
            await client.get("/", PATIENCE_S)
        await client.aclose()


async def test_a_reply_is_bounded_by_the_rows_that_it_may_have() -> None:
    async with ScriptedServer(HEAD + b"content-length: 1200000\r\n\r\n" + b"x" * 1_200_000) as server:
        client = over_httpx(server, 10**9)
        with pytest.raises(ReplicaFailed, match="the reply is too large: more than 1048640 bytes"):
            await client.post("/", b"{}", PATIENCE_S, rows=1, width=1)
        await client.aclose()


async def test_a_request_without_an_answer_ends_in_time() -> None:
    # On a connection that is open: one that is cancelled while it opens is closed by nobody here.
    async with ScriptedServer((OK, stay_silent)) as server:
        client = over_httpx(server)
        await client.get("/", PATIENCE_S)
        with pytest.raises(AttemptTimedOut):
            await client.get("/", 0.05)
        await client.aclose()


async def test_a_stale_connection_costs_no_request() -> None:
    async with ScriptedServer((OK, close), OK) as server:
        client = over_httpx(server)
        replies = [await client.get("/", PATIENCE_S) for _ in range(2)]
        await client.aclose()

    assert [b"ok", b"ok"] == [reply.body for reply in replies]
    assert ["stale"] == [fault.kind for fault in server.faults]


async def test_a_new_connection_that_breaks_is_no_stale_one() -> None:
    async with ScriptedServer(close) as server:
        client = over_httpx(server)
        with pytest.raises(Exception, match="the connection broke"):
            await client.get("/", PATIENCE_S)
        await client.aclose()

    assert [] == server.faults


async def test_dropped_connections_are_not_used_again() -> None:
    async with ScriptedServer(OK) as server:
        client = over_httpx(server)
        await client.get("/", PATIENCE_S)
        await client.get("/", PATIENCE_S)
        assert 1 == len(server.writers)
        client.drop_connections()
        await client.get("/", PATIENCE_S)
        assert 2 == len(server.writers)
        await client.aclose()


class SlowToClose(httpx.AsyncBaseTransport):
    """Transport that answers once it may, and whose end takes a turn of the loop. ends: how often it came."""

    def __init__(self, may_answer: asyncio.Event) -> None:
        self._may_answer = may_answer
        self.ends = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._may_answer.wait()
        return httpx.Response(200, request=request)

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.ends += 1


async def test_requests_at_once_close_each_dropped_transport_once() -> None:
    opened: list[SlowToClose] = []
    may_answer = asyncio.Event()

    def open_transport() -> SlowToClose:
        opened.append(SlowToClose(may_answer))
        return opened[-1]

    client = UpstreamClient("http://x.test", transport=HttpxTransport(open_transport))
    first = []
    for count in (1, 2):
        first.append(asyncio.create_task(client.get("/", PATIENCE_S)))
        await until(lambda count=count: len(opened) == count)
        client.drop_connections()
    may_answer.set()
    await asyncio.gather(*first)

    replies = await asyncio.gather(*(client.get("/", PATIENCE_S) for _ in range(3)))
    await client.aclose()
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [transport.ends for transport in opened] == [1, 1, 1]


async def test_error_bodies_show_no_password_of_the_proxy() -> None:
    proxy = f"http://{USER}:{PASSWORD}@proxy.test:3128"
    sent = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text=f"ERR_X {PASSWORD} {sent}")

    client = UpstreamClient(
        "http://x", options=ConnectionOptions(proxy=proxy), transport=httpx.MockTransport(handle)
    )
    assert b"ERR_X ... ..." == (await client.get("/", 1.0)).body


# --- HTTP/2


NGINX = """
pid {folder}/pid; error_log {folder}/error; daemon off; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {certificate}; ssl_certificate_key {key};
    location / {{ return 200 "$server_protocol $connection"; }}
  }}
}}
"""


@pytest.fixture
def http2_server(authority: Authority, tmp_path: Path) -> Iterator[str]:
    if shutil.which("nginx") is None:
        pytest.skip("no nginx here")
    port, (certificate, key) = free_port(), authority.sign("nginx")
    file = tmp_path / "nginx.conf"
    file.write_text(NGINX.format(folder=tmp_path, port=port, certificate=certificate, key=key))
    process = subprocess.Popen(["nginx", "-c", str(file)])
    try:
        wait_for_port(port, process)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def test_http2_is_used_if_the_server_has_it(http2_server: str, authority: Authority) -> None:
    client = open_egress(spec_of(http2_server, authority, "none"))
    replies = [await client.get("/", PATIENCE_S)]
    replies += await asyncio.gather(*[client.get("/", PATIENCE_S) for _ in range(20)])
    await client.aclose()

    # All share one connection.
    assert {replies[0].body} == {reply.body for reply in replies}
    assert replies[0].body.startswith(b"HTTP/2.0 ")


# --- credentials of each request


class Signer:
    """Authorizer that signs what it sees. seen: the requests."""

    def __init__(self) -> None:
        self.seen: list[OutgoingRequest] = []
        self.refusals = 0
        self.closed = False

    async def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        self.seen.append(request)
        return {"authorization": f"Signature=signature-{len(self.seen)}"}

    def refused(self) -> None:
        self.refusals += 1

    async def aclose(self) -> None:
        self.closed = True


async def test_each_request_is_signed_as_it_is_sent() -> None:
    received: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        received.append(request)
        return httpx.Response(401 if len(received) > 1 else 200, text=request.headers["authorization"])

    signer = Signer()
    client = UpstreamClient(
        "https://x.test/p", {"a": "b"}, transport=httpx.MockTransport(handle), authorizer=signer
    )
    await client.post("/invoke?x=1%3A2", b'{"a": 1}', 1.0)
    refused = await client.get("/models", 1.0)
    await client.aclose()

    first, second = signer.seen
    assert ("POST", "https://x.test/p/invoke?x=1%3A2", b'{"a": 1}') == (first.method, first.url, first.body)
    assert {"a": "b", "host": "x.test", "content-type": "application/json"}.items() <= first.headers.items()
    assert ("GET", b"") == (second.method, second.body)
    assert "Signature=signature-1" == received[0].headers["authorization"]
    # What a vendor repeats of it reaches no caller.
    assert b"..." == refused.body
    assert 1 == signer.refusals
    assert signer.closed


class Clock:
    """Time that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Identity:
    """Identity service of a test. failure: raised instead of a token. gate: a fetch waits for it."""

    def __init__(self) -> None:
        self.fetches = 0
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self) -> AccessToken:
        self.fetches += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return AccessToken(f"token-{self.fetches}", 1000.0)


async def test_callers_share_the_fetch_of_a_token() -> None:
    identity, clock = Identity(), Clock()
    source = TokenSource(identity.fetch, clock)

    assert ["token-1"] * 5 == await asyncio.gather(*[source.value() for _ in range(5)])
    assert 1 == identity.fetches


async def test_a_token_is_renewed_before_it_ends_while_callers_use_it() -> None:
    identity, clock = Identity(), Clock()
    source = TokenSource(identity.fetch, clock)
    await source.value()
    # A fifth of its life is left.
    clock.now_s = 801.0
    identity.gate.clear()

    assert "token-1" == await source.value()
    assert "token-1" == await source.value()
    identity.gate.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert "token-2" == await source.value()
    assert 2 == identity.fetches


async def test_a_failed_renewal_is_repeated_while_the_token_is_valid() -> None:
    identity, clock = Identity(), Clock()
    source = TokenSource(identity.fetch, clock)
    await source.value()
    identity.failure = OSError("down")
    clock.now_s = 900.0
    for _ in range(3):
        assert "token-1" == await source.value()
        await asyncio.sleep(0)
    assert 2 == identity.fetches

    clock.now_s = 1000.0
    with pytest.raises(CredentialRefused) as caught:
        await source.value()
    assert "OSError: down" == caught.value.detail
    identity.failure = None
    assert "token-4" == await source.value()


async def test_a_fetch_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.http.credentials.FETCH_TIMEOUT_S", 0.01)
    identity = Identity()
    identity.gate.clear()
    with pytest.raises(CredentialRefused, match="no access token"):
        await TokenSource(identity.fetch).value()


async def test_a_caller_that_goes_does_not_end_the_fetch_of_others() -> None:
    identity = Identity()
    identity.gate.clear()
    source = TokenSource(identity.fetch)
    first, second = asyncio.create_task(source.value()), asyncio.create_task(source.value())
    await asyncio.sleep(0)
    first.cancel()
    identity.gate.set()

    assert "token-1" == await second
    assert 1 == identity.fetches


async def test_a_refused_token_is_fetched_again() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        is_new = request.headers["authorization"] == "Bearer token-2"
        return httpx.Response(200 if is_new else 401)

    identity = Identity()
    authorizer = BearerToken(TokenSource(identity.fetch))
    client = UpstreamClient("http://x", transport=httpx.MockTransport(handle), authorizer=authorizer)

    assert [401, 200] == [(await client.get("/", 1.0)).status for _ in range(2)]
    await client.aclose()
