"""Calls whose clients read slowly or not at all stay in flight, with their bytes."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from gateway.events import CallFinished, Event
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.tei import FakeTei
from tests.socket_gateway import SocketGateway, socket_gateway, wait_for_value
from tests.waiting import PATIENCE_S

CONFIG = f"""
upstreams: {{up: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: up}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
# So small that a reply of some hundred KB does not fit into the buffers between gateway and client.
KERNEL_BYTES = 4096
SMALL = CONFIG + "limits: {in_flight_bytes: 2000000}\n"
ANSWERED = ([(200, "ok")],)
INPUTS = [f"text {number}" for number in range(2000)]


def outcomes(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return status and outcome of each finished call, without probes."""
    calls = [event for event in events if isinstance(event, CallFinished)]
    return [(call.status, call.outcome) for call in calls if call.route == "/v1/embeddings"]


def in_flight(gateway: SocketGateway) -> tuple[int, bool]:
    """Return the number of calls in flight, and whether bytes of their bodies are held."""
    return gateway.application.in_flight.calls, gateway.application.in_flight._bytes > 0


def has_blocked_connection(gateway: SocketGateway) -> bool:
    """Return whether a connection waits for its client to read."""
    return any(connection.flow.write_paused for connection in gateway.connections)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_call_is_in_flight_until_its_reply_is_read(reads: bool) -> None:
    loop = asyncio.get_running_loop()
    async with (
        socket_gateway(FakeTei(max_client_batch_size=500), CONFIG, KERNEL_BYTES) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        with await gateway.send_call(INPUTS, KERNEL_BYTES) as client:
            assert b"HTTP/1.1 200 OK" == await loop.sock_recv(client, 15)
            # The gateway has written as much of the reply as the buffers take.
            await wait_for_value(True, lambda: has_blocked_connection(gateway))
            # During this round trip the event loop runs every step of the call that does not wait.
            assert 200 == (await gateway.probe()).status_code
            assert (1, True) == in_flight(gateway)
            assert [] == outcomes(gateway.events)
            while reads and in_flight(gateway) != (0, False):
                await loop.sock_recv(client, 100_000)
        await wait_for_value((0, False), lambda: in_flight(gateway))

        # A call whose client disconnects may have finished before the gateway notices.
        assert outcomes(gateway.events) in (ANSWERED if reads else (*ANSWERED, [(499, "cancelled")]))


async def test_replies_that_are_not_read_are_held_until_they_are_read() -> None:
    loop = asyncio.get_running_loop()
    async with (
        socket_gateway(FakeTei(max_client_batch_size=500), SMALL, KERNEL_BYTES) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        held = gateway.application.in_flight
        with await gateway.send_call(INPUTS, KERNEL_BYTES) as client:
            await loop.sock_recv(client, 15)
            await wait_for_value(1, lambda: len(held.readers))
            # The reply is an eighth of all: more than the body of the request.
            assert held.bytes > 100_000
            assert ["acme"] == [reader.tenant for reader in held.readers]
            while held.bytes:
                await loop.sock_recv(client, 100_000)
        assert set() == held.readers


async def test_readers_of_small_replies_are_held_too() -> None:
    loop = asyncio.get_running_loop()
    async with socket_gateway(FakeTei(), CONFIG, KERNEL_BYTES) as gateway, asyncio.timeout(PATIENCE_S):
        held = gateway.application.in_flight
        # Its reply is sent in one piece, and the call is over before the client has read it.
        with await gateway.send_call(INPUTS[:300], KERNEL_BYTES) as client:
            await wait_for_value(True, lambda: bool(held.readers) and not held.calls)
            while held.bytes:
                await loop.sock_recv(client, 100_000)
        assert set() == held.readers


async def test_over_the_bound_slow_readers_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.server.in_flight.GRACE_S", 0)
    async with (
        socket_gateway(FakeTei(max_client_batch_size=500), SMALL, KERNEL_BYTES) as gateway,
        asyncio.timeout(PATIENCE_S),
        contextlib.AsyncExitStack() as stack,
    ):
        held = gateway.application.in_flight
        for number in range(8):
            stack.enter_context(await gateway.send_call(INPUTS, KERNEL_BYTES))
            # Each call waits for its client, or has been cut.
            await wait_for_value(number + 1, lambda: len(held.readers) + len(outcomes(gateway.events)))
        # Without the bound, eight replies wait.
        assert held.bytes < 1_000_000
        assert 200 == (await gateway.call()).status_code
        await wait_for_value(len(held.readers), lambda: len(gateway.connections))
        assert len(held.readers) < 4


async def test_new_bodies_are_refused_while_replies_use_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.server.in_flight.SLOW_BYTES_PER_S", 0)
    config = SMALL.replace("2000000", "700000")
    async with (
        socket_gateway(FakeTei(max_client_batch_size=500), config, KERNEL_BYTES) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        held = gateway.application.in_flight
        with await gateway.send_call(INPUTS, KERNEL_BYTES):
            await wait_for_value(1, lambda: len(held.readers))
            loop = asyncio.get_running_loop()
            with await gateway.send_call("w " * 300_000) as second:
                assert b"HTTP/1.1 503 " == await loop.sock_recv(second, 13)
