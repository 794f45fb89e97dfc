"""Accounting of calls and bytes in flight, and draining of a process."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayFull, ShuttingDown
from gateway.in_flight import RETRY_AFTER_DRAIN_S, SLOW_BYTES_PER_S, InFlight


def test_counts_calls_from_enter_to_leave() -> None:
    in_flight = InFlight(100)
    counts = [in_flight.calls]
    for step in (
        in_flight.enter,
        in_flight.enter,
        in_flight.leave,
        in_flight.enter,
        in_flight.leave,
        in_flight.leave,
    ):
        step()
        counts.append(in_flight.calls)

    assert [0, 1, 2, 1, 2, 1, 0] == counts


def test_refuses_bytes_over_the_bound_until_some_are_released() -> None:
    in_flight = InFlight(100)
    in_flight.hold(60)
    in_flight.hold(40)
    with pytest.raises(GatewayFull) as caught:
        in_flight.hold(1)
    assert 1 == caught.value.retry_after_s
    in_flight.release(60)
    in_flight.hold(60)


def test_a_refusal_takes_no_bytes() -> None:
    in_flight = InFlight(100)
    in_flight.hold(50)
    for _ in range(3):
        with pytest.raises(GatewayFull):
            in_flight.hold(60)

    in_flight.hold(50)


def test_accepts_a_single_body_of_any_size() -> None:
    in_flight = InFlight(100)
    in_flight.hold(500)
    with pytest.raises(GatewayFull):
        in_flight.hold(1)
    in_flight.release(500)
    in_flight.hold(500)


@given(st.lists(st.one_of(st.integers(1, 80), st.none()), max_size=30))
@settings(max_examples=200, deadline=None)
def test_several_bodies_never_exceed_the_bound(plan: list[int | None]) -> None:
    in_flight, bodies = InFlight(100), list[int]()
    for size in plan:
        if size is None:
            if bodies:
                in_flight.release(bodies.pop(0))
            continue
        fits = not bodies or sum(bodies) + size <= 100
        if fits:
            in_flight.hold(size)
            bodies.append(size)
        else:
            with pytest.raises(GatewayFull):
                in_flight.hold(size)


async def test_drains_an_idle_process_at_once() -> None:
    in_flight = InFlight(100)

    assert await in_flight.drain(0)
    assert in_flight.draining


async def test_a_draining_process_refuses_new_calls() -> None:
    in_flight = InFlight(100)
    await in_flight.drain(0)
    with pytest.raises(ShuttingDown) as caught:
        in_flight.enter()

    assert RETRY_AFTER_DRAIN_S == caught.value.retry_after_s
    assert 0 == in_flight.calls


async def test_drain_waits_for_the_last_call() -> None:
    in_flight = InFlight(100)
    in_flight.enter()
    in_flight.enter()
    drained = asyncio.create_task(in_flight.drain(30))
    await asyncio.sleep(0)
    in_flight.leave()
    await asyncio.sleep(0)
    assert not drained.done()
    with pytest.raises(ShuttingDown):
        in_flight.enter()
    in_flight.leave()

    assert await drained


async def test_drain_reports_a_timeout_and_calls_may_still_finish() -> None:
    in_flight = InFlight(100)
    in_flight.enter()
    assert not await in_flight.drain(0)
    assert 1 == in_flight.calls
    in_flight.leave()

    assert await in_flight.drain(0)


class Reader:
    """Client that holds bytes of a reply and reads at a rate."""

    def __init__(self, in_flight: InFlight, size: int, rate: float) -> None:
        self.connected = True
        self._in_flight, self._size, self._rate = in_flight, size, rate
        in_flight.hold_reply(size)
        in_flight.readers.add(self)

    def bytes_per_s(self) -> float:
        return self._rate

    def disconnect(self) -> None:
        self.connected = False
        self._in_flight.readers.remove(self)
        self._in_flight.release_reply(self._size)


SLOW, FAST = SLOW_BYTES_PER_S / 2, SLOW_BYTES_PER_S * 2


def test_replies_count_as_bytes_in_flight() -> None:
    in_flight = InFlight(100)
    in_flight.hold_reply(60)
    in_flight.hold(40)
    with pytest.raises(GatewayFull):
        in_flight.hold(1)
    in_flight.release_reply(60)
    assert 40 == in_flight.bytes


def test_slow_readers_are_disconnected_over_an_eighth_slowest_first() -> None:
    in_flight = InFlight(800)
    readers = [Reader(in_flight, 30, rate) for rate in (SLOW + 1, SLOW, FAST)]
    Reader(in_flight, 30, FAST)

    assert [True, False, True] == [reader.connected for reader in readers]
    assert 90 == in_flight.bytes


def test_fast_readers_are_disconnected_over_a_half(caplog: pytest.LogCaptureFixture) -> None:
    in_flight = InFlight(800)
    readers = [Reader(in_flight, 200, FAST + 1), Reader(in_flight, 200, FAST)]
    assert all(reader.connected for reader in readers)
    Reader(in_flight, 10, FAST)

    assert [True, False] == [reader.connected for reader in readers]
    assert "disconnected 1 clients" in caplog.text


def test_a_single_reply_of_any_size_is_sent() -> None:
    in_flight = InFlight(100)

    assert Reader(in_flight, 5000, SLOW).connected
