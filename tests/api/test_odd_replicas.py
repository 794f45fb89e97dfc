"""Replicas whose answers are odd for a while: they change nothing of what their model offers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from backends.contract import Operation
from gateway.events import ReplicaChanged
from gateway.routing import prober
from gateway.routing.prober import ProbeIntervals
from gateway.upstreams import factory
from tests.conftest import Boots, Running
from tests.fakes.tei import Hook
from tests.fakes.threaded import serve_in_thread
from tests.fakes.vllm import FakeVllm
from tests.waiting import PATIENCE_S

CONFIG = """
upstreams: {vectors: {backend: vllm, replicas: [%s], policy: round_robin}}
models: {m: {upstream: vectors}}
"""
NOT_FOUND = b'{"detail":"Not Found"}'
PAGE = b"<html>404 page not found</html>"


@pytest.fixture(autouse=True)
def frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe replicas all the time."""
    intervals = ProbeIntervals(0.005, 0.01, stall_timeout_s=30.0)
    monkeypatch.setattr(factory, "REMOTE_PROBES", intervals)
    monkeypatch.setattr(prober, "CHECK_EVERY_S", 0.005)
    monkeypatch.setattr(prober, "IDLE_PROBE_AFTER_S", 0.02)


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, FakeVllm]]:
    """Return three servers on real ports, by URL."""
    fakes = [FakeVllm() for _ in range(3)]
    with ExitStack() as stack:
        yield {stack.enter_context(serve_in_thread(fake)): fake for fake in fakes}


@pytest.fixture
def servers(ports: dict[str, FakeVllm]) -> dict[str, FakeVllm]:
    """Return the servers as they were at their start: well, and without requests."""
    for server in ports.values():
        server.hook = None
        server.requests.clear()
    return ports


def answering(status: int, body: bytes) -> Hook:
    """Return a hook that answers every POST with this response; the server still names its model."""

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        return (status, body) if sent else None

    return hook


def dropping(server: FakeVllm) -> Hook:
    """Return a hook that drops the last vector of every list."""

    async def hook(path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        if path != "/v1/embeddings":
            return None
        reply = server.routes()[path](body)
        return 200, json.dumps(reply | {"data": reply["data"][:-1]}).encode()

    return hook


ODDITIES = {
    "404 of the server": answering(404, NOT_FOUND),
    "404 of an ingress": answering(404, PAGE),
    "405": answering(405, b""),
    "501": answering(501, b""),
    "500": answering(500, b""),
    "unreadable": answering(200, b"<html>"),
    "fewer": None,
}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the servers run in threads, which a busy loop would starve."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - plain state without an event
            await asyncio.sleep(0.005)


def config_of(servers: dict[str, FakeVllm]) -> str:
    return CONFIG % ", ".join(f'"{url}"' for url in servers)


def states(gateway: Running, replica: str) -> list[str]:
    events = [event for event in gateway.events if isinstance(event, ReplicaChanged)]
    return [event.state for event in events if event.replica == replica]


def offer(gateway: Running) -> tuple[Any, Any]:
    capabilities = gateway.application.gateway.upstreams["vectors"].capabilities
    return (None, None) if capabilities is None else (capabilities.operations, capabilities.outputs)


async def embed(gateway: Running) -> int:
    return (await gateway.post("/v1/embeddings", {"model": "m", "input": ["a", "b"]})).status_code


async def embed_until(gateway: Running, *expected: str, replica: str) -> list[int]:
    """Call until a replica has passed through these states; return the statuses."""
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while states(gateway, replica)[-len(expected) :] != list(expected):
            seen += await asyncio.gather(*(embed(gateway) for _ in range(4)))
            # The servers run in threads of this process, which calls without a pause would starve.
            await asyncio.sleep(0.02)
    return seen


@pytest.mark.parametrize(("oddity", "place"), [*((oddity, 0) for oddity in ODDITIES), ("500", 2)])
async def test_odd_replica_under_load_changes_nothing_for_callers(
    boot: Boots, servers: dict[str, FakeVllm], oddity: str, place: int
) -> None:
    url, server = list(servers.items())[place]
    async with boot({}, config_of(servers), sockets=True) as gateway:
        before = offer(gateway)
        server.hook = ODDITIES[oddity] or dropping(server)
        while_odd = await embed_until(gateway, "down", replica=url)
        probes = len(server.requests) + 6
        async with asyncio.timeout(PATIENCE_S):
            while len(server.requests) < probes:
                while_odd.append(await embed(gateway))
        during = offer(gateway)
        server.hook = None
        afterwards = await embed_until(gateway, "probation", "up", replica=url)
        well = [await embed(gateway) for _ in range(30)]

    assert 400 not in while_odd
    assert {200} == set(while_odd[-5:]) | set(afterwards) | set(well)
    assert Operation.EMBED in before[0]
    assert before == during == offer(gateway)


@pytest.mark.parametrize("oddity", ODDITIES)
async def test_odd_replica_without_work_keeps_its_offer(
    boot: Boots, servers: dict[str, FakeVllm], oddity: str
) -> None:
    server = next(iter(servers.values()))
    async with boot({}, config_of(servers), sockets=True) as gateway:
        before = offer(gateway)
        server.hook = ODDITIES[oddity] or dropping(server)
        probes = len(server.requests) + 30
        await until(lambda: len(server.requests) >= probes)
        during = offer(gateway)
        server.hook = None
        statuses = [await embed(gateway) for _ in range(30)]

    assert before == during == offer(gateway)
    assert {200} == set(statuses)


@pytest.mark.parametrize("oddity", ODDITIES)
async def test_first_start_with_an_odd_replica(
    boot: Boots, servers: dict[str, FakeVllm], oddity: str
) -> None:
    url, server = next(iter(servers.items()))
    server.hook = ODDITIES[oddity] or dropping(server)
    async with boot({}, config_of(servers), sockets=True) as gateway:
        assert {200} == {await embed(gateway) for _ in range(30)}
        assert "up" not in states(gateway, url)
        server.hook = None
        await until(lambda: "probation" in states(gateway, url))
        assert {200} == {await embed(gateway) for _ in range(30)}


@pytest.mark.parametrize("oddity", ODDITIES)
async def test_all_replicas_odd_at_the_first_start(
    boot: Boots, servers: dict[str, FakeVllm], oddity: str
) -> None:
    for server in servers.values():
        server.hook = ODDITIES[oddity] or dropping(server)
    async with boot({}, config_of(servers), sockets=True) as gateway:
        assert 503 == await embed(gateway)
        for server in servers.values():
            server.hook = None
        for url in servers:
            await until(lambda url=url: "probation" in states(gateway, url))
        assert {200} == {await embed(gateway) for _ in range(30)}
