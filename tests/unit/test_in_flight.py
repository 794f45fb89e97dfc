"""Accounting of calls and bytes in flight, and draining of a process."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayFull, ShuttingDown
from gateway.in_flight import RETRY_AFTER_DRAIN_S, InFlight


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
