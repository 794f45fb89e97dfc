"""Calls and bytes that a process holds, and how it stops without dropping any."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayFull, ShuttingDown
from gateway.in_flight import RETRY_AFTER_DRAIN_S, InFlight


def test_calls_are_counted_from_enter_to_leave() -> None:
    held = InFlight(100)
    counts = [held.calls]
    for act in (held.enter, held.enter, held.leave, held.enter, held.leave, held.leave):
        act()
        counts.append(held.calls)

    assert [0, 1, 2, 1, 2, 1, 0] == counts


def test_bytes_over_the_bound_are_refused_until_others_are_done_with() -> None:
    held = InFlight(100)
    held.hold(60)
    held.hold(40)
    with pytest.raises(GatewayFull) as caught:
        held.hold(1)
    assert 1 == caught.value.retry_after_s
    held.release(60)
    held.hold(60)


def test_a_refusal_holds_nothing() -> None:
    held = InFlight(100)
    held.hold(50)
    for _ in range(3):
        with pytest.raises(GatewayFull):
            held.hold(60)

    held.hold(50)


def test_a_lone_body_is_taken_whatever_its_size() -> None:
    held = InFlight(100)
    held.hold(500)
    with pytest.raises(GatewayFull):
        held.hold(1)
    held.release(500)
    held.hold(500)


@given(st.lists(st.one_of(st.integers(1, 80), st.none()), max_size=30))
@settings(max_examples=200, deadline=None)
def test_several_bodies_together_never_hold_more_than_the_bound(plan: list[int | None]) -> None:
    held, bodies = InFlight(100), list[int]()
    for size in plan:
        if size is None:
            if bodies:
                held.release(bodies.pop(0))
            continue
        fits = not bodies or sum(bodies) + size <= 100
        if fits:
            held.hold(size)
            bodies.append(size)
        else:
            with pytest.raises(GatewayFull):
                held.hold(size)


async def test_draining_an_idle_process_is_done_at_once() -> None:
    held = InFlight(100)

    assert await held.drain(0)
    assert held.draining


async def test_a_draining_process_takes_nothing_new() -> None:
    held = InFlight(100)
    await held.drain(0)
    with pytest.raises(ShuttingDown) as caught:
        held.enter()

    assert RETRY_AFTER_DRAIN_S == caught.value.retry_after_s
    assert 0 == held.calls


async def test_draining_waits_for_the_last_call() -> None:
    held = InFlight(100)
    held.enter()
    held.enter()
    drained = asyncio.create_task(held.drain(30))
    await asyncio.sleep(0)
    held.leave()
    await asyncio.sleep(0)
    assert not drained.done()
    with pytest.raises(ShuttingDown):
        held.enter()
    held.leave()

    assert await drained


async def test_draining_says_when_time_ran_out_and_calls_may_still_end() -> None:
    held = InFlight(100)
    held.enter()
    assert not await held.drain(0)
    assert 1 == held.calls
    held.leave()

    assert await held.drain(0)
