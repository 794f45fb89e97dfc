"""Fetching pictures from real servers: bounds, redirects, pinned addresses, and every failure refused."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
import trustme

from gateway.config.schema import FetchSettings
from gateway.media.addresses import Target
from gateway.media.fetch import Connector, Fetcher, Permits, Resolve
from tests.fakes.picture_host import BODY, PictureHost, reply, serving


def fetcher_of(server: PictureHost, **changes: object) -> Fetcher:
    values = {
        "hosts": ("a.example", "b.example"),
        "schemes": ("http",),
        "ports": (server.port,),
        "private": ("127.0.0.1/32",),
    }
    return Fetcher(FetchSettings(**(values | changes)), resolve_to_loopback)


def resolver(*found: str) -> Resolve:
    """Return a function that resolves every name to these addresses."""

    async def resolve(host: str) -> Sequence[str]:
        return found

    return resolve


async def stall(host: str) -> Sequence[str]:
    """Resolve no name, and never end."""
    await asyncio.Event().wait()
    return []


class RefusingConnector:
    """Connector to addresses that accept no connection, which it records."""

    def __init__(self) -> None:
        self.connected: list[tuple[str, str]] = []

    async def __call__(self, ip: str, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append((ip, target.host))
        raise ConnectionRefusedError


resolve_to_loopback = resolver("127.0.0.1")


async def fetched(fetcher: Fetcher, url: str) -> bytes:
    return await fetcher.fetch(url, "acme", fetcher.budget())


async def test_a_picture_is_fetched_with_nothing_of_the_gateway() -> None:
    async with serving(reply()) as server:
        assert BODY == await fetched(fetcher_of(server), f"http://a.example:{server.port}/x?y=z#part")
    lines = server.seen[0].decode().split("\r\n")
    assert lines[0] == "GET /x?y=z HTTP/1.1"
    assert {line.partition(":")[0] for line in lines[1:] if line} == {
        "host",
        "accept",
        "accept-encoding",
        "user-agent",
        "connection",
    }
    assert f"host: a.example:{server.port}" in lines


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + reply(headers="content-encoding: identity\r\n"),
        reply() + b"HTTP/1.1 200 OK\r\n\r\nmore",
    ],
)
async def test_each_form_of_a_body_is_read(answer: bytes) -> None:
    async with serving(answer) as server:
        body = await fetched(fetcher_of(server), f"http://a.example:{server.port}/")
    assert BODY == body[: len(BODY)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(status="404 Not Found"), "status 404"),
        (reply(status="401 Unauthorized", headers="www-authenticate: Basic\r\n"), "status 401"),
        (reply(status="204 No Content"), "status 204|valid HTTP"),
        (reply(headers="content-encoding: gzip\r\n"), "compressed"),
        (reply(headers="Content-Encoding: br\r\n"), "compressed"),
        (reply(b"x" * 5000), "item_bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 400_000, "item_bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, "item_bytes"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n",
            "item_bytes",
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"x" * 200_000, "valid HTTP: .* chunk"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000, "valid HTTP: .* head|item_bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 40, "informational"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort", "broke"),
        (b"", "broke"),
        (b"SSH-2.0-OpenSSH_9\r\n", "valid HTTP"),
        (b"* OK IMAP ready\r\n", "valid HTTP"),
        (reply(status="302 Found"), "no location"),
        (reply(status="302 Found", headers="location: http://c.example/\r\n"), r"moved, .*(hosts|ports)"),
        (
            reply(status="301 Moved", headers="location: http://169.254.169.254/\r\n"),
            r"moved, .*(hosts|ports)",
        ),
        (reply(status="308 Moved", headers="location: file:///etc/passwd\r\n"), "moved, .* not of http"),
        (reply(status="307 Moved", headers="location: /again\r\n"), "moved more than 3 times"),
        (reply(status="303 See", headers="location: http://[::1\r\n"), "not a URL"),
    ],
)
async def test_a_reply_that_is_no_picture_is_refused(answer: bytes, reason: str) -> None:
    async with serving(answer) as server:
        fetcher = fetcher_of(server, item_bytes=4096)
        with pytest.raises(ValueError, match=reason):
            await fetched(fetcher, f"http://a.example:{server.port}/")
    assert len(server.seen) <= 4


async def test_a_redirect_is_followed_to_a_listed_host() -> None:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        is_first = b"a.example" in head
        moved = reply(status="302 Found", headers=f"location: //b.example:{server.port}/z\r\n")
        writer.write(moved if is_first else reply())
        await writer.drain()

    async with serving(answer) as server:
        assert BODY == await fetched(fetcher_of(server), f"http://a.example:{server.port}/")
    assert [head.split(b" ")[1] for head in server.seen] == [b"/", b"/z"]


async def test_a_name_that_changes_its_address_is_checked_at_each_redirect() -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])

    async def rebind(host: str) -> Sequence[str]:
        return next(answers)

    async with serving(reply(status="302 Found", headers="location: /again\r\n")) as server:
        settings = FetchSettings(
            hosts=("a.example",), schemes=("http",), ports=(server.port,), private=("127.0.0.1/32",)
        )
        with pytest.raises(ValueError, match="not public"):
            await fetched(Fetcher(settings, rebind), f"http://a.example:{server.port}/")
    assert len(server.seen) == 1


async def test_the_connection_goes_to_the_checked_address() -> None:
    resolved, connector = [], RefusingConnector()

    async def resolve(host: str) -> Sequence[str]:
        resolved.append(host)
        return ["8.8.8.8", "2606:4700::1111"]

    fetcher = Fetcher(FetchSettings(hosts=("a.example",)), resolve, connector)
    with pytest.raises(ValueError, match="accepts no connection"):
        await fetched(fetcher, "https://a.example/")
    assert resolved == ["a.example"]
    assert connector.connected == [("8.8.8.8", "a.example"), ("2606:4700::1111", "a.example")]


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "10.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["fd00:ec2::254"],
        [],
    ],
)
async def test_no_connection_is_opened_to_an_address_that_is_not_public(found: list[str]) -> None:
    connector = RefusingConnector()
    fetcher = Fetcher(FetchSettings(hosts=("*",)), resolver(*found), connector)
    with pytest.raises(ValueError, match=r"not public|no IP address"):
        await fetched(fetcher, "https://rebinding.example/")
    assert connector.connected == []


async def test_a_name_that_is_not_known_is_refused() -> None:
    async def resolve(host: str) -> Sequence[str]:
        raise OSError("name or service not known")

    with pytest.raises(ValueError, match="its host is not known"):
        await fetched(Fetcher(FetchSettings(hosts=("*",)), resolve), "https://a.example/")


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx"])
async def test_a_server_that_stalls_is_left_in_time(first: bytes) -> None:
    gone = asyncio.Event()

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await gone.wait()

    async with serving(answer) as server:
        with pytest.raises(ValueError, match=r"not fetched within 0\.2 s"):
            await fetched(fetcher_of(server, timeout_s=0.2), f"http://a.example:{server.port}/")
        gone.set()


async def test_a_resolver_that_stalls_is_left_in_time() -> None:
    fetcher = Fetcher(FetchSettings(hosts=("*",), timeout_s=0.1), stall)
    with pytest.raises(ValueError, match=r"within 0\.1 s"):
        await fetched(fetcher, "https://a.example/")


async def test_lookups_that_stall_take_only_a_share_of_the_threads() -> None:
    released = asyncio.Event()

    async def resolve(host: str) -> Sequence[str]:
        if host.startswith("slow"):
            await released.wait()
        raise OSError

    fetcher = Fetcher(FetchSettings(hosts=("*", "127.0.0.1"), timeout_s=0.1), resolve)
    slow = [f"https://slow{n}.example/" for n in range(6)]
    stalled = await fetcher.fetch_all(slow, "one")
    assert {"it was not fetched within 0.1 s"} == {str(error) for error in stalled.values()}

    found = await fetcher.fetch_all(["https://a.example/", "https://127.0.0.1/"], "two")
    later = await fetcher.fetch_all(["https://a.example/"], "one")
    released.set()
    await asyncio.sleep(0)
    after = await fetcher.fetch_all(["https://a.example/"], "one")

    assert "its host is not known" == str(found["https://a.example/"])
    assert "its host is not public" in str(found["https://127.0.0.1/"])
    assert "within 0.1 s" in str(later["https://a.example/"])
    assert "its host is not known" == str(after["https://a.example/"])


async def test_the_time_of_the_caller_ends_a_fetch_too() -> None:
    fetched = await Fetcher(FetchSettings(hosts=("*",)), stall).fetch_all(["https://a.example/"], "t", 0.1)
    assert "it was not fetched within 0.1 s" == str(fetched["https://a.example/"])


async def test_all_pictures_of_a_request_share_its_bytes() -> None:
    async with serving(reply(b"x" * 3000)) as server:
        fetcher = fetcher_of(server, item_bytes=4096, request_bytes=5000)
        budget = fetcher.budget()
        await fetcher.fetch(f"http://a.example:{server.port}/1", "acme", budget)
        with pytest.raises(ValueError, match="request_bytes"):
            await fetcher.fetch(f"http://a.example:{server.port}/2", "acme", budget)
        await fetched(fetcher, f"http://a.example:{server.port}/3")


async def test_tls_is_checked_for_the_name_and_not_for_the_address() -> None:
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.example").configure_cert(server_context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    async with serving(reply(), server_context) as server:
        settings = FetchSettings(
            hosts=("*.example",), ports=(server.port,), private=("127.0.0.0/8",), timeout_s=30
        )
        trusting = Fetcher(settings, resolve_to_loopback, Connector(client_context))
        assert BODY == await fetched(trusting, f"https://a.example:{server.port}/")
        for fetcher, name in (
            (trusting, "b.example"),
            (Fetcher(settings, resolve_to_loopback, Connector()), "a.example"),
        ):
            with pytest.raises(ValueError, match="no certificate that is trusted"):
                await fetched(fetcher, f"https://{name}:{server.port}/")
    assert len(server.seen) == 1


async def test_an_authority_of_an_internal_host_is_trusted_alone(tmp_path: Path) -> None:
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("a.example").configure_cert(server_context)
    own, other = tmp_path / "own.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(own)
    trustme.CA().cert_pem.write_to_path(other)
    async with serving(reply(), server_context) as server:
        url = f"https://a.example:{server.port}/"
        trusting = fetcher_of(server, schemes=("https",), ca=str(own), timeout_s=30)
        assert BODY == await fetched(trusting, url)
        with pytest.raises(ValueError, match="no certificate that is trusted"):
            await fetched(fetcher_of(server, schemes=("https",), ca=str(other), timeout_s=30), url)


async def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(reply()) as server:
        assert BODY == await fetched(fetcher_of(server), f"http://a.example:{server.port}/")


async def test_one_tenant_takes_only_its_permits() -> None:
    permits = Permits(3, 2)
    held: list[str] = []
    release = asyncio.Event()

    async def work(tenant: str) -> None:
        async with permits.hold(tenant):
            held.append(tenant)
            await release.wait()

    tasks = [asyncio.create_task(work(tenant)) for tenant in ("a", "a", "a", "a", "b", "b")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sorted(held) == ["a", "a", "b"]
    tasks[0].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not len(permits)
