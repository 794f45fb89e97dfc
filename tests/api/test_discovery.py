"""DNS discovery: replicas join and leave with a name's addresses, and no call fails for it."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from backends.http.client import ConnectionOptions, UpstreamClient
from gateway.events import ReplicaChanged
from gateway.routing import discovery
from tests.conftest import Boots, Running
from tests.fakes.hooks import Gate, fail_with, until
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

CONFIG = """
upstreams: {one: {backend: tei, replicas: ["http://tei.example:8080"], discover: dns, policy: round_robin}}
models: {bge: {upstream: one}}
"""

WAITING = CONFIG.replace("policy: round_robin", "when_unavailable: wait")


class Names:
    """A resolver whose answers the test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.queries: set[tuple[str, int]] = set()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.queries.add((host, port))
        if not self.addresses:
            raise OSError("no answer")
        return list(self.addresses)


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "REFRESH_EVERY_S", 0.01)
    monkeypatch.setattr(discovery, "DRAIN_POLL_S", 0.01)


async def embed(gateway: Running, text: str) -> int:
    return (await gateway.post("/v1/embeddings", {"input": text})).status_code


def states(gateway: Running) -> list[tuple[str, str]]:
    return [(event.replica, event.state) for event in gateway.events if isinstance(event, ReplicaChanged)]


async def test_each_address_is_a_replica(boot: Boots) -> None:
    servers, names = {"10.0.0.1": FakeTei(), "10.0.0.2": FakeTei()}, Names("10.0.0.1", "10.0.0.2")
    async with boot(servers, CONFIG, resolver=names) as gateway:
        assert [200] * 6 == [await embed(gateway, f"text {number}") for number in range(6)]

    assert {("tei.example", 8080)} == names.queries
    assert {("http://tei.example:8080#0", "up"), ("http://tei.example:8080#1", "up")} == set(states(gateway))
    assert all(server.requests for server in servers.values())


async def test_new_address_joins_and_a_removed_one_completes_its_work(boot: Boots) -> None:
    gate, old, new = Gate(), FakeTei(), FakeTei()
    old.hook = gate
    names = Names("10.0.0.1")
    async with boot({"10.0.0.1": old, "10.0.0.2": new}, CONFIG, resolver=names) as gateway:
        held = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        names.addresses = ["10.0.0.2"]
        await _until_seen(gateway, ("http://tei.example:8080#0", "gone"))
        await _until_seen(gateway, ("http://tei.example:8080#1", "up"))
        assert 200 == await embed(gateway, "later")
        gate.opened.set()
        assert 200 == await held
        # Its name is free again once it is removed, so that labels do not grow with addresses.
        await until(lambda: not _leaving())
        names.addresses = ["10.0.0.2", "10.0.0.1"]
        await _until_seen(gateway, ("http://tei.example:8080#0", "up"), times=2)

    assert 1 == len(old.requests)


async def test_failed_resolution_changes_nothing(boot: Boots) -> None:
    names = Names("10.0.0.1")
    async with boot({"10.0.0.1": FakeTei()}, CONFIG, resolver=names) as gateway:
        names.addresses = []
        names.queries.clear()
        async with asyncio.timeout(PATIENCE_S):
            while not names.queries:  # noqa: ASYNC110 - an empty resolution sets no event
                await asyncio.sleep(0.01)
        assert 200 == await embed(gateway, "text")

    assert [("http://tei.example:8080#0", "up")] == states(gateway)


async def test_unresolved_name_is_503_and_does_not_delay_readiness(boot: Boots) -> None:
    async with boot({}, CONFIG, resolver=Names()) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": "text"})

    assert (503, "no_replica") == (reply.status_code, reply.json()["error"]["code"])
    assert "5" == reply.headers["retry-after"]


async def test_name_without_address_may_get_one_later(boot: Boots) -> None:
    names = Names()
    async with boot({"10.0.0.1": FakeTei()}, CONFIG, resolver=names) as gateway:
        assert 503 == await embed(gateway, "too early")
        names.addresses = ["10.0.0.1"]
        await _until_seen(gateway, ("http://tei.example:8080#0", "up"))
        assert 200 == await embed(gateway, "in time")


async def test_first_call_waits_for_a_replica_and_counts_as_queued(boot: Boots) -> None:
    names = Names()
    async with boot({"10.0.0.1": FakeTei()}, WAITING, resolver=names) as gateway:
        held = asyncio.create_task(embed(gateway, "first"))
        await _until_queued(gateway)
        names.addresses = ["10.0.0.1"]
        assert 200 == await held
        assert 0 == await queued(gateway)


async def test_call_waits_while_all_replicas_are_gone_and_counts_as_queued(boot: Boots) -> None:
    old, names = FakeTei(), Names("10.0.0.1")
    async with boot({"10.0.0.1": old, "10.0.0.2": FakeTei()}, WAITING, resolver=names) as gateway:
        assert 200 == await embed(gateway, "before")
        # A deployment scaled to zero: nothing listens, and the name has no address.
        names.addresses = []
        old.hook = fail_with(httpx.ConnectError("nobody listens"))
        held = asyncio.create_task(embed(gateway, "meanwhile"))
        await _until_seen(gateway, ("http://tei.example:8080#0", "down"))
        await _until_queued(gateway)
        names.addresses = ["10.0.0.2"]
        assert 200 == await held

    assert ("http://tei.example:8080#0", "gone") in states(gateway)


async def test_call_that_no_replica_joins_for_gets_retry_after(boot: Boots) -> None:
    async with boot({}, WAITING, resolver=Names()) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": "text"}, x_timeout_s="0.05")

    assert (503, "model_loading") == (reply.status_code, reply.json()["error"]["code"])
    assert "5" == reply.headers["retry-after"]


async def test_client_pinned_to_an_address_sends_the_host_name() -> None:
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    door = UpstreamClient(f"http://no-such-name.invalid:{port}", options=ConnectionOptions(ip="127.0.0.1"))
    response = await door.get("/info", 5)
    await door.aclose()
    server.close()

    assert (200, b"ok") == (response.status, response.body)
    assert f"host: no-such-name.invalid:{port}".encode() in received[0].lower()


async def test_resolves_addresses_of_one_family() -> None:
    addresses = await discovery.resolve("localhost", 80)

    assert addresses
    assert 1 == len({":" in address for address in addresses})


async def queued(gateway: Running) -> float:
    """Return the queued tokens from `/metrics`."""
    body = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text
    [line] = [line for line in body.splitlines() if line.startswith("gateway_lane_queued_tokens{")]
    return float(line.rpartition(" ")[2])


async def _until_queued(gateway: Running) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await queued(gateway):  # noqa: ASYNC110 - a gauge sets no event
            await asyncio.sleep(0)


def _leaving() -> bool:
    return any("drain_replica" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def _until_seen(gateway: Running, state: tuple[str, str], times: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while states(gateway).count(state) < times:  # noqa: ASYNC110 - events are a list
            await asyncio.sleep(0.01)
