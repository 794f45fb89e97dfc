"""A call and its bytes are in flight until its caller has read the reply."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.events import CallFinished, Event
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.tei import FakeTei
from tests.socket_gateway import Serving, comes_to, serving

CONFIG = f"""
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
# So that an answer of some hundred KB does not fit between the two.
KERNEL_BYTES = 4096
ANSWERED = ([(200, "ok")],)
MANY = [f"text {number}" for number in range(2000)]


def outcomes(events: Sequence[Event]) -> list[tuple[int, str]]:
    return [(one.status, one.outcome) for one in events if isinstance(one, CallFinished)]


def held(gateway: Serving) -> tuple[int, bool]:
    """Return the calls in flight, and whether their bytes are held."""
    return gateway.application.in_flight.calls, gateway.application.in_flight._bytes > 0


@pytest.mark.parametrize("reads", [True, False])
async def test_a_call_is_in_flight_until_its_reply_is_read(reads: bool) -> None:
    loop = asyncio.get_running_loop()
    async with (
        serving(FakeTei(max_client_batch_size=500), CONFIG, KERNEL_BYTES) as gateway,
        asyncio.timeout(20),
    ):
        with await gateway.ask(MANY, KERNEL_BYTES) as client:
            assert b"HTTP/1.1 200 OK" == await loop.sock_recv(client, 15)
            # All that was computed has been written by now, as far as it goes.
            await asyncio.sleep(0.2)
            assert (1, True) == held(gateway)
            assert [] == outcomes(gateway.events)
            while reads and held(gateway) != (0, False):
                await loop.sock_recv(client, 100_000)
        await comes_to((0, False), lambda: held(gateway))

        # Whoever goes may still be counted as answered.
        assert outcomes(gateway.events) in (ANSWERED if reads else (*ANSWERED, [(499, "cancelled")]))
