"""Redis slow, frozen, gone, forgetful, full or back: what callers see is what the config chose."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.errors import QuotaExceeded, QuotaUnavailable
from gateway.events import Event, StoreChanged
from gateway.quotas.ledger import Ask
from gateway.quotas.limits import SECOND_US, Cost, parse_limit
from gateway.quotas.redis_door import RedisDoor
from gateway.quotas.redis_ledger import RedisLedger, Rules, WhenUnavailable
from tests.quotas.redis_server import RedisServer

LIMITS = (parse_limit("requests_per_hour", 3600), parse_limit("tokens_per_day", 1000))
Trouble = Callable[[RedisServer], object]


class Running:
    """A ledger with its keeper, and what it has observed."""

    def __init__(self, ledger: RedisLedger, events: list[Event]) -> None:
        self.ledger = ledger
        self.events = events
        self._number = 0

    async def call(self, tokens: int = 1) -> bool:
        """One call, reserved and settled; whether it was counted without the store."""
        self._number += 1
        ask = Ask(f"{id(self)}-{self._number}", "acme", LIMITS, Cost(tokens=tokens), 60 * SECOND_US, "m")
        taken = await self.ledger.reserve(ask)
        self.ledger.settle(taken, Cost(tokens=tokens))
        return taken.degraded

    @property
    def changes(self) -> list[bool]:
        """Each time the store was given up (True) or came back."""
        return [event.away for event in self.events if isinstance(event, StoreChanged)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the keeper, which looks once a second."""
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - the keeper tells nobody
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running(
    server: RedisServer, when: WhenUnavailable = "local", *, keep: bool = True
) -> AsyncIterator[Running]:
    events: list[Event] = []
    ledger = RedisLedger(RedisDoor(server.url, 0.1), Rules(when), "gateway", events.append)
    keeper = asyncio.create_task(ledger.keep()) if keep else None
    try:
        yield Running(ledger, events)
    finally:
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await ledger.aclose()


async def swallow(attempt: Callable[[], Awaitable[object]], times: int) -> None:
    """Let misses add up; refusals for want of burst are what `local` promises."""
    for _ in range(times):
        with suppress(QuotaExceeded, QuotaUnavailable):
            await attempt()


FULL: Trouble = lambda server: server.command("CONFIG", "SET", "maxmemory", "1")  # noqa: E731
READ_ONLY: Trouble = lambda server: server.command("REPLICAOF", "127.0.0.1", "1")  # noqa: E731


@pytest.mark.parametrize(
    "trouble",
    [RedisServer.freeze, RedisServer.kill, FULL, READ_ONLY],
    ids=["frozen", "killed", "full", "read-only"],
)
async def test_whatever_is_wrong_with_it_three_misses_change_the_mode_once(
    own_redis: RedisServer, trouble: Trouble
) -> None:
    async with running(own_redis, "allow", keep=False) as gateway:
        assert not await gateway.call()
        trouble(own_redis)
        assert [True] * 6 == [await gateway.call() for _ in range(6)]

    assert [True] == gateway.changes


async def test_refuse_answers_503_and_nothing_else(own_redis: RedisServer) -> None:
    async with running(own_redis, "refuse") as gateway:
        await gateway.call()
        own_redis.kill()
        for _ in range(5):
            with pytest.raises(QuotaUnavailable) as caught:
                await gateway.call()

    assert 1 == caught.value.retry_after_s


async def test_local_allows_its_share_of_what_was_last_seen_to_remain(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call(400)
        own_redis.kill()
        # Rates refill from empty at one a second; the day's remainder is what it was.
        await swallow(gateway.call, 3)
        await asyncio.sleep(1.1)
        assert await gateway.call(550)
        await asyncio.sleep(1.1)
        with pytest.raises(QuotaExceeded, match="tokens_per_day"):
            await gateway.call(100)


async def test_when_it_is_back_local_use_has_been_charged(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call(100)
        own_redis.freeze()
        await swallow(gateway.call, 4)
        assert [True] == gateway.changes
        await asyncio.sleep(1.2)
        assert await gateway.call(300)
        own_redis.thaw()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call(590)
        with pytest.raises(QuotaExceeded):
            await gateway.call(20)


async def test_a_server_that_forgot_its_scripts_and_data_goes_on(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call(900)
        own_redis.command("SCRIPT", "FLUSH")
        assert not await gateway.call(50)
        own_redis.command("FLUSHALL")
        assert not await gateway.call(900)

    assert [] == gateway.changes


async def test_a_server_that_was_restarted_is_used_again(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call()
        own_redis.kill()
        await swallow(gateway.call, 4)
        own_redis.restart()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call()


async def test_what_was_in_flight_when_it_went_is_settled_when_it_is_back(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        ask = Ask("flying", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US, "m")
        taken = await gateway.ledger.reserve(ask)
        own_redis.freeze()
        gateway.ledger.settle(taken, Cost(tokens=100))
        await swallow(gateway.call, 4)
        own_redis.thaw()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call(800)


async def test_closing_a_ledger_tells_what_nobody_has_waited_for(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call(900)
        taken = await gateway.ledger.reserve(Ask("last", "acme", LIMITS, Cost(tokens=100), SECOND_US))
        gateway.ledger.settle(taken, Cost(tokens=40))
    async with running(own_redis, keep=False) as another:
        assert not await another.call(60)
        with pytest.raises(QuotaExceeded):
            await another.call(1)


async def test_closing_a_ledger_does_not_wait_for_a_store_that_is_away(own_redis: RedisServer) -> None:
    async with asyncio.timeout(10), running(own_redis, keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()


async def test_a_slot_is_free_for_the_next_call_of_the_same_turn(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, keep=False) as gateway:
        for number in range(20):
            ask = Ask(f"slot-{number}", "acme", limits, Cost(), 60 * SECOND_US)
            gateway.ledger.settle(await gateway.ledger.reserve(ask), Cost())


async def test_a_reserve_that_nobody_waits_for_any_more_holds_nothing(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, keep=False) as gateway:
        gone = asyncio.create_task(
            gateway.ledger.reserve(Ask("gone", "acme", limits, Cost(), 60 * SECOND_US))
        )
        for _ in range(3):
            # It departs in one of the next turns.
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await gateway.ledger.settled()
        taken = await gateway.ledger.reserve(Ask("next", "acme", limits, Cost(), 60 * SECOND_US))

    assert 0 == taken.standings[0].remaining


async def test_a_reserve_that_is_heard_after_it_was_closed_takes_nothing(own_redis: RedisServer) -> None:
    late = Ask("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", keep=False) as gateway:
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.kill()
        own_redis.restart()
        # The store has forgotten it, and is told that it is closed; then it hears of it after all.
        await gateway.ledger.settled()
    async with running(own_redis, keep=False) as again:
        await again.ledger.reserve(late)
        assert not await again.call(1000)


async def test_a_reserve_that_was_given_up_holds_nothing_when_the_store_wakes(own_redis: RedisServer) -> None:
    late = Ask("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.thaw()
        await gateway.ledger.settled()
        assert not await gateway.call(999)


async def test_whoever_waits_behind_a_trip_without_an_answer_is_served_without_the_store(
    own_redis: RedisServer,
) -> None:
    async with running(own_redis, "allow", keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        waiting = []
        for number in range(40):
            ask = Ask(f"{number}", f"tenant-{number % 20}", LIMITS, Cost(tokens=1), 60 * SECOND_US)
            waiting.append(asyncio.create_task(gateway.ledger.reserve(ask)))
            # Another turn, another trip, as long as there is one to go with.
            await asyncio.sleep(0)
        taken = await asyncio.gather(*waiting)
        own_redis.thaw()
        await gateway.ledger.settled()
        whole = [
            await gateway.ledger.reserve(Ask(f"w{n}", f"tenant-{n}", LIMITS, Cost(tokens=1000), SECOND_US))
            for n in range(20)
        ]

    assert all(one.degraded for one in taken)
    assert not any(one.degraded for one in whole)


async def test_what_one_run_cannot_carry_goes_in_the_next(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_per_day", 1000),)
    async with running(own_redis, keep=False) as gateway:
        asks = [Ask(f"many-{n}", "acme", limits, Cost(), 60 * SECOND_US) for n in range(300)]
        taken = await asyncio.gather(*(gateway.ledger.reserve(ask) for ask in asks))
        for one in taken:
            gateway.ledger.settle(one, Cost(requests=0))
        await gateway.ledger.settled()
        probe = await gateway.ledger.reserve(Ask("probe", "acme", limits, Cost(), 60 * SECOND_US))

    assert sorted(range(700, 1000)) == sorted(one.standings[0].remaining for one in taken)
    assert 999 == probe.standings[0].remaining


async def test_many_checks_of_one_turn_travel_together(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call()
        before = reads(own_redis)
        await asyncio.gather(*(gateway.call(0) for _ in range(100)))

    # 100 reserves and 100 settles; one by one they would be 200 and more.
    assert reads(own_redis) - before < 60


def reads(server: RedisServer) -> int:
    """How often the server has read from a socket: few, where much travels together."""
    lines = server.command("INFO", "stats").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("total_reads_processed"))


async def test_nothing_over_the_limit_is_admitted_by_four_gateways_at_once(own_redis: RedisServer) -> None:
    limits = (parse_limit("tokens_per_day", 5000), parse_limit("requests_in_flight", 7))
    doors = [RedisDoor(own_redis.url, 5) for _ in range(4)]
    ledgers = [RedisLedger(door, Rules(), f"g{i}", lambda _: None) for i, door in enumerate(doors)]
    admitted, flying, most = 0, 0, 0

    async def call(number: int) -> None:
        nonlocal admitted, flying, most
        ledger, cost = ledgers[number % 4], Cost(tokens=number % 37)
        try:
            taken = await ledger.reserve(Ask(str(number), "acme", limits, cost, 60 * SECOND_US))
        except QuotaExceeded:
            return
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0)
        flying -= 1
        admitted += number % 37 // 2
        ledger.settle(taken, Cost(tokens=number % 37 // 2))

    for start in range(0, 1200, 64):
        await asyncio.gather(*(call(number) for number in range(start, start + 64)))
    for ledger in ledgers:
        await ledger.aclose()

    assert 0 < admitted <= 5000
    assert 0 < most <= 7
