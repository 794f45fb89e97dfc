"""Memory for bodies: its shares, and bodies that are not sent to their end."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.api.server.http_protocol import BodyPace
from gateway.events import CallFinished, Event, QuotaDecided
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.hooks import Gate, tei_with_hook
from tests.fakes.tei import FakeTei
from tests.socket_gateway import SocketGateway, socket_gateway, wait_for_value
from tests.waiting import PATIENCE_S

GREEDY = "greedy-key-0123456789abcdef"
HELD_MAX = 2_000_000
CONFIG = f"""
upstreams: {{up: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: up}}}}
limits: {{in_flight_bytes: {HELD_MAX}}}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"]}}
  greedy: {{keys: ["{key_digest(GREEDY)}"], limits: {{requests_per_day: 2}}}}
"""
ANNOUNCED = 1_500_000
LARGE = b" " * 100_000


def decisions(events: Sequence[Event]) -> list[str]:
    """Return the quota decisions about the greedy tenant."""
    return [
        event.decision for event in events if isinstance(event, QuotaDecided) and event.tenant == "greedy"
    ]


def ended_calls(events: Sequence[Event]) -> list[int]:
    """Return the status of each finished call of the greedy tenant."""
    return [event.status for event in events if isinstance(event, CallFinished) and event.tenant == "greedy"]


async def hang_up(gateway: SocketGateway, part: bytes) -> None:
    """Send a part of a body as the greedy tenant, hang up when it is held, and wait for the call's end."""
    held, ended = gateway.application.in_flight, len(ended_calls(gateway.events))
    _, writer = await gateway.send_part(GREEDY, part, ANNOUNCED)
    await wait_for_value(len(part), lambda: held.bytes)
    writer.transport.abort()
    await wait_for_value(ended + 1, lambda: len(ended_calls(gateway.events)))


async def test_stalled_bodies_of_one_tenant_keep_no_other_out() -> None:
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        held = gateway.application.in_flight
        stalled, answered = [], 0
        for _ in range(8):
            stalled.append(await gateway.send_part(GREEDY, b" " * 400_000, ANNOUNCED))
            # It is held, or has been refused.
            await wait_for_value(len(stalled), lambda: len(held.receiving) + len(ended_calls(gateway.events)))
        while (await gateway.call()).status_code == 200 and answered < 20:
            answered += 1

        assert 20 == answered
        for _, writer in stalled:
            writer.close()


async def test_a_body_that_makes_room_is_refused_in_its_dialect() -> None:
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        held = gateway.application.in_flight
        reader, writer = await gateway.send_part(GREEDY, b" " * 1_400_000, ANNOUNCED)
        await wait_for_value(1_400_000, lambda: held.bytes)
        body = b'{"input": "a"' + b" " * 800_000
        second, other = await gateway.send_part(KEY, body + b"}", len(body) + 1)
        reply = await reader.readuntil(b'"}')
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"gateway_full"' in reply
        assert b"HTTP/1.1 200 OK" == await second.readexactly(15)
        await wait_for_value(0, lambda: held.bytes)
        writer.close()
        other.close()


async def test_bodies_that_grow_together_are_not_all_refused() -> None:
    config = CONFIG.replace("requests_per_day: 2", "requests_per_day: 100")
    async with socket_gateway(FakeTei(), config) as gateway, asyncio.timeout(PATIENCE_S):
        held = gateway.application.in_flight
        rest = b" " * 300_000 + b'{"input": "a"}'
        begun = [await gateway.send_part(GREEDY, b" " * 200_000, 200_000 + len(rest)) for _ in range(6)]
        await wait_for_value(6 * 200_000, lambda: held.bytes)
        for _, writer in begun:
            writer.write(rest)
        statuses = [(await reader.readexactly(13))[9:12] for reader, _ in begun]
        assert {b"200", b"503"} == set(statuses)
        for _, writer in begun:
            writer.close()


async def test_hanging_up_in_a_large_body_costs_a_request() -> None:
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        await hang_up(gateway, LARGE)
        await hang_up(gateway, LARGE)
        await hang_up(gateway, LARGE)
        # The third one was refused by the ledger: now the gateway knows, and reads nothing more.
        assert ["bad_request", "bad_request", "refused"] == decisions(gateway.events)
        assert [499, 499, 499] == ended_calls(gateway.events)
        reader, writer = await gateway.send_part(GREEDY, b"", ANNOUNCED)
        assert b"HTTP/1.1 429 " == await reader.readexactly(13)
        writer.close()


async def test_hanging_up_in_a_small_body_costs_nothing() -> None:
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        await hang_up(gateway, b" " * 1000)
        assert [] == decisions(gateway.events)


@pytest.mark.parametrize("part", [b"", b" " * 100, LARGE], ids=["nothing", "little", "much"])
async def test_a_stalled_body_is_refused_soon_and_costs_a_request(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyPace, "check_s", 0.2)
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        reader, writer = await gateway.send_part(GREEDY, part, ANNOUNCED)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        await wait_for_value(["bad_request"], lambda: decisions(gateway.events))
        writer.close()


async def test_a_slow_body_that_keeps_the_pace_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyPace, "check_s", 0.05)
    checks: list[bool] = []
    is_late = BodyPace.is_late

    def check(pace: BodyPace, came: int, *, was_paused: bool) -> bool:
        checks.append(is_late(pace, came, was_paused=was_paused))
        return checks[-1]

    monkeypatch.setattr(BodyPace, "is_late", check)
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        body = b'{"input": "a"' + b" " * 1_000_000 + b"}"
        reader, writer = await gateway.send_part(KEY, body[:13], len(body))
        sent = 13
        while len(checks) < 3 and sent < len(body) - 2000:
            writer.write(body[sent : sent + 2000])
            sent += 2000
            await asyncio.sleep(0.001)
        writer.write(body[sent:])
        assert b"HTTP/1.1 200 OK" == await reader.readexactly(15)
        assert [False] * 3 == checks[:3]
        writer.close()


async def test_a_refused_body_of_a_spent_tenant_renews_the_report() -> None:
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        held = gateway.application.in_flight
        # Three calls pass the check of the head while nothing is known, and stay there.
        parts = [await gateway.send_part(GREEDY, LARGE, ANNOUNCED) for _ in range(3)]
        await wait_for_value(3 * len(LARGE), lambda: held.bytes)
        await hang_up_all(parts[:2])
        await wait_for_value(["bad_request"] * 2, lambda: decisions(gateway.events))
        _, other = await gateway.send_part(KEY, b" " * 600_000, ANNOUNCED)
        await wait_for_value(len(LARGE) + 600_000, lambda: held.bytes)
        reader, writer = parts[2]
        writer.write(b" " * 1_390_000)
        assert b"HTTP/1.1 429 " == await reader.readexactly(13)
        writer.close()
        other.close()


@pytest.mark.parametrize(("character", "bytes_each"), [("a", 1), ("文", 2), ("😀", 4)])
async def test_a_body_counts_as_its_decoded_text_until_the_call_ends(character: str, bytes_each: int) -> None:
    gate = Gate()
    async with (
        socket_gateway(tei_with_hook(gate), CONFIG) as gateway,
        asyncio.timeout(PATIENCE_S),
    ):
        held = gateway.application.in_flight
        inputs = ["a" * 9_999 + character] * 20
        with await gateway.send_call(inputs):
            await wait_for_value(True, lambda: gate.waiting > 0)
            assert 200_000 * bytes_each < held.bytes < 200_000 * bytes_each + 4000
            gate.opened.set()
            await wait_for_value(0, lambda: held.bytes)


async def hang_up_all(parts: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """Close connections in the middle of their bodies."""
    for _, writer in parts:
        writer.transport.abort()
