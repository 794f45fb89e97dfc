"""Accounting of calls and bytes in flight, and draining of a process."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.server.in_flight import (
    RETRY_AFTER_DRAIN_S,
    SLOW_BYTES_PER_S,
    SMALL_BODY_BYTES,
    HeldBody,
    InFlight,
)
from gateway.errors import GatewayFull, ShuttingDown

MIB = 1024 * 1024


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


class SentBody(HeldBody):
    """Body of a request, which one tenant sends."""

    def __init__(self, in_flight: InFlight, tenant: str = "acme", *, is_complete: bool = True) -> None:
        super().__init__(in_flight, tenant)
        self.evicted = False
        self._all = in_flight
        if not is_complete:
            in_flight.receiving.add(self)

    def arrive(self, size: int) -> bool:
        """Return whether the bytes were taken."""
        others = self._all.bytes - self.held_bytes
        try:
            self.hold(size)
        except GatewayFull:
            assert others == self._all.bytes
            assert 0 == self.held_bytes
            return False
        return True

    def evict(self) -> None:
        assert 0 == self.held_bytes
        self.evicted = True


def test_a_tenant_takes_three_quarters_until_it_releases_some() -> None:
    in_flight = InFlight(100)
    bodies = [SentBody(in_flight) for _ in range(5)]
    assert [True, True, True, False] == [body.arrive(25) for body in bodies[:4]]
    bodies[0].release()
    bodies[0].release()
    assert 50 == in_flight.bytes
    assert bodies[4].arrive(25)


def test_a_refused_body_leaves_its_room_to_others_that_grow() -> None:
    in_flight = InFlight(100)
    bodies = [SentBody(in_flight, is_complete=False) for _ in range(3)]
    assert all(body.arrive(20) for body in bodies)

    assert [False, True, False] == [body.arrive(20) for body in bodies]


def test_a_refusal_has_a_time_to_retry() -> None:
    in_flight = InFlight(100)
    SentBody(in_flight).hold(80)
    with pytest.raises(GatewayFull) as caught:
        SentBody(in_flight).hold(1)
    assert 1 == caught.value.retry_after_s


def test_accepts_a_single_body_of_any_size() -> None:
    in_flight = InFlight(100)
    body = SentBody(in_flight)
    assert [True, True] == [body.arrive(50), body.arrive(450)]
    assert not SentBody(in_flight).arrive(1)
    body.release()
    assert SentBody(in_flight).arrive(500)


def test_a_tenant_that_took_all_it_can_leaves_room_for_others() -> None:
    in_flight = InFlight(MIB)
    while SentBody(in_flight, "greedy").arrive(1024):
        pass
    assert 3 * MIB // 4 == in_flight.bytes
    others = [SentBody(in_flight, f"other-{number}") for number in range(8)]

    assert all(other.arrive(1024) for other in others)


def test_only_small_bodies_take_the_reserve() -> None:
    in_flight = InFlight(4 * MIB)
    for number in range(15):
        assert SentBody(in_flight, f"tenant-{number}").arrive(MIB // 4)

    assert not SentBody(in_flight, "late").arrive(MIB // 4)
    assert SentBody(in_flight, "late").arrive(SMALL_BODY_BYTES)


def test_unfinished_bodies_of_a_larger_tenant_make_room() -> None:
    in_flight = InFlight(100)
    complete = SentBody(in_flight, "greedy")
    unfinished = [SentBody(in_flight, "greedy", is_complete=False) for _ in range(2)]
    small = SentBody(in_flight, "modest", is_complete=False)
    assert all(body.arrive(size) for body, size in zip((complete, *unfinished), (40, 25, 10), strict=True))
    assert small.arrive(5)
    assert SentBody(in_flight, "other").arrive(30)

    assert [True, False, False] == [body.evicted for body in (*unfinished, small)]
    assert 40 + 10 + 5 + 30 == in_flight.bytes


def test_a_tenant_never_makes_room_for_a_larger_one() -> None:
    in_flight = InFlight(100)
    assert SentBody(in_flight, "greedy").arrive(60)
    modest = SentBody(in_flight, "modest", is_complete=False)
    assert modest.arrive(30)

    assert not SentBody(in_flight, "greedy").arrive(10)
    assert not modest.evicted


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.one_of(st.integers(1, 80), st.none()), st.booleans()),
        max_size=40,
    )
)
@settings(max_examples=300, deadline=None)
def test_bodies_of_tenants_never_exceed_the_bound(plan: list[tuple[str, int | None, bool]]) -> None:
    in_flight, bodies = InFlight(100), list[SentBody]()
    for tenant, size, is_complete in plan:
        if size is None:
            if bodies:
                body = bodies.pop(0)
                in_flight.receiving.discard(body)
                body.release()
            continue
        body = SentBody(in_flight, tenant, is_complete=is_complete)
        if body.arrive(size):
            bodies.append(body)
        else:
            in_flight.receiving.discard(body)
        bodies = [body for body in bodies if not body.evicted]
        held = [body.held_bytes for body in bodies]
        assert sum(held) == in_flight.bytes
        assert sum(held) <= 100
    for body in bodies:
        body.release()
    assert 0 == in_flight.bytes


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

    def __init__(self, in_flight: InFlight, size: int, rate: float, tenant: str = "acme") -> None:
        self.connected = True
        self.tenant = tenant
        self.held_bytes = size
        self._in_flight, self._rate = in_flight, rate
        in_flight.hold_reply(size)
        in_flight.readers.add(self)

    def bytes_per_s(self) -> float:
        return self._rate

    def disconnect(self) -> None:
        self.connected = False
        self._in_flight.readers.remove(self)
        self._in_flight.release_reply(self.held_bytes)


SLOW, FAST = SLOW_BYTES_PER_S / 2, SLOW_BYTES_PER_S * 2


def test_replies_count_as_bytes_in_flight() -> None:
    in_flight = InFlight(100)
    in_flight.hold_reply(60)
    body = SentBody(in_flight)
    assert body.arrive(40)
    assert not SentBody(in_flight).arrive(1)
    in_flight.release_reply(60)
    assert 40 == in_flight.bytes


def test_slow_readers_are_disconnected_over_an_eighth_slowest_first() -> None:
    in_flight = InFlight(800)
    readers = [Reader(in_flight, 60, rate) for rate in (SLOW + 1, SLOW, FAST)]
    Reader(in_flight, 30, FAST)

    assert [True, False, True] == [reader.connected for reader in readers]
    assert 150 == in_flight.bytes


def test_replies_of_fast_readers_disconnect_no_slow_one() -> None:
    in_flight = InFlight(800)
    slow = Reader(in_flight, 90, SLOW)
    for _ in range(3):
        Reader(in_flight, 100, FAST)

    assert slow.connected


def test_the_slowest_reader_of_the_tenant_that_holds_most_is_disconnected() -> None:
    in_flight = InFlight(800)
    modest = Reader(in_flight, 40, SLOW, "modest")
    greedy = [Reader(in_flight, 30, rate, "greedy") for rate in (SLOW + 1, SLOW + 2)]
    Reader(in_flight, 10, FAST, "modest")
    assert all(reader.connected for reader in (modest, *greedy))
    greedy.append(Reader(in_flight, 30, SLOW + 3, "greedy"))
    Reader(in_flight, 10, FAST, "modest")
    assert [True, False, True, True] == [reader.connected for reader in (modest, *greedy)]


def test_fast_readers_are_disconnected_over_a_half(caplog: pytest.LogCaptureFixture) -> None:
    in_flight = InFlight(800)
    modest = Reader(in_flight, 100, FAST, "modest")
    readers = [Reader(in_flight, 150, FAST + 1), Reader(in_flight, 150, FAST + 2)]
    assert all(reader.connected for reader in readers)
    Reader(in_flight, 10, FAST, "modest")

    assert [True, False, True] == [reader.connected for reader in (modest, *readers)]
    assert "disconnected 1 clients" in caplog.text


def test_a_single_reply_of_any_size_is_sent() -> None:
    in_flight = InFlight(100)

    assert Reader(in_flight, 5000, SLOW).connected
