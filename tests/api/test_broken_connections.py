"""Calls while connections to a replica break, over real sockets."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.events import ConnectionFaulted, ReplicaChanged
from tests.conftest import Boots, Running
from tests.fakes.hooks import until
from tests.fakes.hostile_replica import HostileReplica
from tests.fakes.tei import FakeTei

OPENAI = "/v1/embeddings"
CALLS = 200


def config_of(*replicas: HostileReplica) -> str:
    addresses = ", ".join(f'"{replica.address}"' for replica in replicas)
    return f"""
upstreams: {{embedder: {{backend: tei, replicas: [{addresses}]}}}}
models: {{bge: {{upstream: embedder}}}}
defaults: {{embed: bge}}
"""


async def statuses_of_calls(gateway: Running, calls: int = CALLS) -> list[int]:
    """Send calls, four at a time, and return their statuses."""

    async def call_often() -> list[int]:
        return [
            (await gateway.post(OPENAI, {"input": [f"text {number}"]})).status_code
            for number in range(calls // 4)
        ]

    return [status for part in await asyncio.gather(*(call_often() for _ in range(4))) for status in part]


def states(gateway: Running) -> list[str]:
    return [event.state for event in gateway.events if isinstance(event, ReplicaChanged)]


def faults(gateway: Running) -> list[ConnectionFaulted]:
    return [event for event in gateway.events if isinstance(event, ConnectionFaulted)]


@pytest.mark.parametrize("replicas", [1, 3])
async def test_kept_alive_connections_that_break_cost_no_call(boot: Boots, replicas: int) -> None:
    servers = [HostileReplica(FakeTei()) for _ in range(replicas)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        gateway = await stack.enter_async_context(boot({}, config_of(*servers), sockets=True))
        for server in servers:
            server.breaks = lambda number, is_reused: is_reused and number % 5 == 0
        statuses = await statuses_of_calls(gateway)

    assert [200] * CALLS == statuses
    assert ["up"] * replicas == states(gateway)
    assert {("embedder", server.address, "stale") for server in servers} == {
        (event.upstream, event.replica, event.kind) for event in faults(gateway)
    }


async def test_short_keep_alive_times_cost_no_call(boot: Boots) -> None:
    async with HostileReplica(FakeTei()) as server:
        server.keep_alive_s = 0.001
        async with boot({}, config_of(server), sockets=True) as gateway:
            statuses = await statuses_of_calls(gateway)

    assert [200] * CALLS == statuses
    assert ["up"] == states(gateway)


async def test_one_broken_connection_does_not_eject_the_last_replica(boot: Boots) -> None:
    async with HostileReplica(FakeTei()) as server, boot({}, config_of(server), sockets=True) as gateway:
        # The first attempt finds its kept-alive connection stale, and the fresh one breaks too.
        broken = iter([True, True])
        server.breaks = lambda _number, _reused: next(broken, False)
        again = await gateway.post(OPENAI, {"input": "a"})
        statuses = await statuses_of_calls(gateway)

    # It completed a plain text, so that the call was sent again.
    assert 200 == again.status_code
    assert [200] * CALLS == statuses
    assert ["up"] == states(gateway)


@pytest.mark.usefixtures("brief_return")
async def test_last_replica_that_answers_no_probe_is_ejected(boot: Boots) -> None:
    async with HostileReplica(FakeTei()) as server, boot({}, config_of(server), sockets=True) as gateway:
        server.breaks = lambda _number, _reused: True
        failed = await gateway.post(OPENAI, {"input": "a"})
        await until(lambda: "down" in states(gateway))
        refused = await gateway.post(OPENAI, {"input": "a"})

    assert [502, 503] == [failed.status_code, refused.status_code]
    [down] = [
        event for event in gateway.events if isinstance(event, ReplicaChanged) and event.state == "down"
    ]
    assert "the connection broke before the reply was complete" == down.reason


async def test_unsolicited_data_names_its_replica(boot: Boots) -> None:
    async with HostileReplica(FakeTei()) as server, boot({}, config_of(server), sockets=True) as gateway:
        await gateway.post(OPENAI, {"input": "a"})
        for writer in server.writers:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: bool(faults(gateway)))
        assert [200] * 8 == await statuses_of_calls(gateway, 8)

    [fault] = {event for event in faults(gateway) if event.pause_s}
    assert ConnectionFaulted("embedder", server.address, "unsolicited", 60.0) == fault
