"""Redis slow, frozen, gone, forgetful, full or back: what callers see is what the config chose."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import msgspec
import pytest

from gateway.errors import QuotaExceeded, QuotaUnavailable
from gateway.events import Event, StoreChanged
from gateway.quotas.ledger import QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost, Limit, parse_limit
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger, WhenUnavailable
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script
from tests.quotas.redis_server import RedisServer
from tests.quotas.test_redis_ledger import Clock

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
        ask = QuotaRequest(
            f"{id(self)}-{self._number}", "acme", LIMITS, Cost(tokens=tokens), 60 * SECOND_US, "m"
        )
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
    ledger = RedisLedger(RedisClient(server.url, 0.1), OutagePolicy(when), "gateway", events.append)
    keeper = asyncio.create_task(ledger.maintain()) if keep else None
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
async def test_three_failures_switch_to_the_outage_mode_once(
    own_redis: RedisServer, trouble: Trouble
) -> None:
    async with running(own_redis, "allow", keep=False) as gateway:
        assert not await gateway.call()
        trouble(own_redis)
        assert [True] * 6 == [await gateway.call() for _ in range(6)]

    assert [True] == gateway.changes


async def test_one_late_reply_does_not_refuse_an_idle_tenant(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        own_redis.freeze()
        late = await gateway.call()
        own_redis.thaw()

        assert late
        assert not await gateway.call()
    assert [] == gateway.changes


async def test_refuse_policy_returns_503(own_redis: RedisServer) -> None:
    async with running(own_redis, "refuse") as gateway:
        await gateway.call()
        own_redis.kill()
        for _ in range(5):
            with pytest.raises(QuotaUnavailable) as caught:
                await gateway.call()

    assert 1 == caught.value.retry_after_s


async def test_local_policy_admits_its_share_of_the_remaining_amount(own_redis: RedisServer) -> None:
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


async def test_charges_local_usage_after_an_outage(own_redis: RedisServer) -> None:
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


async def test_continues_after_scripts_and_data_are_lost(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call(900)
        own_redis.command("SCRIPT", "FLUSH")
        assert not await gateway.call(50)
        own_redis.command("FLUSHALL")
        assert not await gateway.call(900)

    assert [] == gateway.changes


async def test_uses_a_restarted_server(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call()
        own_redis.kill()
        await swallow(gateway.call, 4)
        own_redis.restart()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call()


async def test_full_server_stays_down_until_it_accepts_writes(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call()
        FULL(own_redis)
        await swallow(gateway.call, 4)
        beats = scripts(own_redis) + 3
        # It is asked every second whether it is back.
        await gateway.until(lambda: scripts(own_redis) >= beats)
        assert [True] == gateway.changes
        own_redis.command("CONFIG", "SET", "maxmemory", "0")
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call()


async def test_settles_requests_in_flight_after_an_outage(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        ask = QuotaRequest("flying", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US, "m")
        taken = await gateway.ledger.reserve(ask)
        own_redis.freeze()
        gateway.ledger.settle(taken, Cost(tokens=100))
        await swallow(gateway.call, 4)
        own_redis.thaw()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call(800)


async def test_closing_a_ledger_sends_unsent_settlements(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call(900)
        taken = await gateway.ledger.reserve(
            QuotaRequest("last", "acme", LIMITS, Cost(tokens=100), SECOND_US)
        )
        gateway.ledger.settle(taken, Cost(tokens=40))
    async with running(own_redis, keep=False) as another:
        assert not await another.call(60)
        with pytest.raises(QuotaExceeded):
            await another.call(1)


async def test_closing_a_ledger_does_not_wait_for_a_store_outage(own_redis: RedisServer) -> None:
    async with asyncio.timeout(10), running(own_redis, keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()


async def test_slot_is_free_for_the_next_request_of_the_same_turn(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, keep=False) as gateway:
        for number in range(20):
            ask = QuotaRequest(f"slot-{number}", "acme", limits, Cost(), 60 * SECOND_US)
            gateway.ledger.settle(await gateway.ledger.reserve(ask), Cost())


async def test_cancelled_reserve_holds_nothing(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, keep=False) as gateway:
        gone = asyncio.create_task(
            gateway.ledger.reserve(QuotaRequest("gone", "acme", limits, Cost(), 60 * SECOND_US))
        )
        for _ in range(3):
            # It departs in one of the next turns.
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await gateway.ledger.flush()
        taken = await gateway.ledger.reserve(QuotaRequest("next", "acme", limits, Cost(), 60 * SECOND_US))

    assert 0 == taken.limit_statuses[0].remaining


async def test_reserve_received_after_its_refund_takes_nothing(own_redis: RedisServer) -> None:
    late = QuotaRequest("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", keep=False) as gateway:
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.kill()
        own_redis.restart()
        # The store has forgotten it, and is told that it is closed; then it hears of it after all.
        await gateway.ledger.flush()
    async with running(own_redis, keep=False) as again:
        await again.ledger.reserve(late)
        assert not await again.call(1000)


async def test_timed_out_reserve_holds_nothing_afterwards(own_redis: RedisServer) -> None:
    late = QuotaRequest("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.thaw()
        await gateway.ledger.flush()
        assert not await gateway.call(999)


async def test_requests_queued_behind_a_failed_batch_are_served_locally(
    own_redis: RedisServer,
) -> None:
    async with running(own_redis, "allow", keep=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        waiting = []
        for number in range(40):
            ask = QuotaRequest(f"{number}", f"tenant-{number % 20}", LIMITS, Cost(tokens=1), 60 * SECOND_US)
            waiting.append(asyncio.create_task(gateway.ledger.reserve(ask)))
            # Another turn, another trip, as long as there is one to go with.
            await asyncio.sleep(0)
        taken = await asyncio.gather(*waiting)
        own_redis.thaw()
        await gateway.ledger.flush()
        whole = [
            await gateway.ledger.reserve(
                QuotaRequest(f"w{n}", f"tenant-{n}", LIMITS, Cost(tokens=1000), SECOND_US)
            )
            for n in range(20)
        ]

    assert all(one.degraded for one in taken)
    assert not any(one.degraded for one in whole)


async def test_splits_many_reserves_over_several_script_calls(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_per_day", 1000),)
    async with running(own_redis, keep=False) as gateway:
        asks = [QuotaRequest(f"many-{n}", "acme", limits, Cost(), 60 * SECOND_US) for n in range(300)]
        taken = await asyncio.gather(*(gateway.ledger.reserve(ask) for ask in asks))
        for one in taken:
            gateway.ledger.settle(one, Cost(requests=0))
        await gateway.ledger.flush()
        probe = await gateway.ledger.reserve(QuotaRequest("probe", "acme", limits, Cost(), 60 * SECOND_US))

    assert sorted(range(700, 1000)) == sorted(one.limit_statuses[0].remaining for one in taken)
    assert 999 == probe.limit_statuses[0].remaining


async def test_batches_reserves_of_one_turn(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call()
        before = reads(own_redis)
        await asyncio.gather(*(gateway.call(0) for _ in range(100)))

    # 100 reserves and 100 settles; one by one they would be 200 and more.
    assert reads(own_redis) - before < 60


async def test_sends_a_reserve_before_a_busy_loop_continues(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call()
        await gateway.ledger.flush()
        before = scripts(own_redis)
        ask = QuotaRequest("now", "acme", LIMITS, Cost(), 60 * SECOND_US, "m")
        reserving = asyncio.create_task(gateway.ledger.reserve(ask))
        # It is asked for in one turn and leaves in the next; then the loop does nothing but look.
        for _ in range(2):
            await asyncio.sleep(0)
        ends_s = time.monotonic() + 5
        while scripts(own_redis) == before and time.monotonic() < ends_s:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop is to be busy
        seen = scripts(own_redis) - before
        gateway.ledger.settle(await reserving, Cost())

    assert 1 == seen


@pytest.mark.parametrize(
    ("slots", "others", "told"),
    [(1, 0, 1), (63, 0, 1), (65, 0, 0), (65, 1, 1), (1000, 0, 0), (1000, 499, 0), (1000, 500, 1)],
)
async def test_returns_a_scarce_slot_at_once(
    own_redis: RedisServer, slots: int, others: int, told: int
) -> None:
    limits = (parse_limit("requests_in_flight", 4000, "key a "), parse_limit("requests_in_flight", slots))
    async with running(own_redis, keep=False) as gateway, running(own_redis, keep=False) as other:
        taken = await gateway.ledger.reserve(QuotaRequest("one", "acme", limits, Cost(), 60 * SECOND_US))
        asks = [QuotaRequest(f"more-{n}", "acme", limits, Cost(), 60 * SECOND_US) for n in range(others)]
        await asyncio.gather(*(gateway.ledger.reserve(ask) for ask in asks))
        before = scripts(own_redis)
        gateway.ledger.settle(taken, Cost())
        # Of two turns one is for all that have work for the store, and in the next it leaves.
        for _ in range(2):
            await asyncio.sleep(0)
        seen = scripts(own_redis) - before
        await gateway.ledger.flush()
        left = await other.ledger.reserve(QuotaRequest("two", "acme", limits, Cost(), 60 * SECOND_US))

    assert told == seen
    assert slots - 1 - others == left.limit_statuses[1].remaining


@pytest.mark.parametrize("turns", [0, 1, 2, 10], ids=lambda turns: f"{turns} turns before")
async def test_retries_once_on_a_lost_idle_connection(own_redis: RedisServer, turns: int) -> None:
    async with running(own_redis, keep=False) as gateway:
        await gateway.call()
        await gateway.ledger.flush()
        checking = asyncio.create_task(gateway.call())
        # With one turn it is asked for, and written to a connection that has ended but is not heard to have.
        for _ in range(turns):
            await asyncio.sleep(0)
        own_redis.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert not await checking
        await gateway.ledger.flush()

    assert [] == gateway.changes


async def test_reloads_scripts_over_a_single_connection(own_redis: RedisServer) -> None:
    ledger = RedisLedger(
        RedisClient(f"{own_redis.url}?max_connections=1", 0.5), OutagePolicy("refuse"), "one", lambda _: None
    )
    try:
        gateway = Running(ledger, [])
        for _ in range(2):
            assert not await gateway.call()
            await ledger.flush()
            own_redis.command("SCRIPT", "FLUSH")
        assert not await gateway.call()
    finally:
        await ledger.aclose()


async def test_call_that_cannot_be_packed_fails_alone(own_redis: RedisServer) -> None:
    door = RedisClient(own_redis.url, 0.5)
    program = Script("return ARGV[1]", hashlib.sha1(b"return ARGV[1]", usedforsecurity=False).hexdigest())
    try:
        for _ in range(2):
            assert b"well" == await door.run_script(program, ["a"], b"well")
            with pytest.raises(StoreUnavailable):
                await door.run_script(program, ["\ud800"], b"odd")
        assert b"well" == await door.run_script(program, ["a"], b"well")
    finally:
        await door.aclose()


def scripts(server: RedisServer) -> int:
    """How many scripts the server has run by their names."""
    lines = server.command("INFO", "commandstats").splitlines()
    found = next((line for line in lines if line.startswith("cmdstat_evalsha:")), "calls=0,")
    return int(found.partition("calls=")[2].partition(",")[0])


def reads(server: RedisServer) -> int:
    """How often the server has read from a socket: few, where much travels together."""
    lines = server.command("INFO", "stats").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("total_reads_processed"))


async def test_four_gateways_never_exceed_a_limit(own_redis: RedisServer) -> None:
    limits = (parse_limit("tokens_per_day", 5000), parse_limit("requests_in_flight", 7))
    doors = [RedisClient(own_redis.url, 5) for _ in range(4)]
    ledgers = [RedisLedger(door, OutagePolicy(), f"g{i}", lambda _: None) for i, door in enumerate(doors)]
    admitted, flying, most = 0, 0, 0

    async def call(number: int) -> None:
        nonlocal admitted, flying, most
        ledger, cost = ledgers[number % 4], Cost(tokens=number % 37)
        try:
            taken = await ledger.reserve(QuotaRequest(str(number), "acme", limits, cost, 60 * SECOND_US))
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


DAY = (parse_limit("tokens_per_day", 1000),)


def asked(id_: str, limits: tuple[Limit, ...] = DAY, tokens: int = 0, tenant: str = "acme") -> QuotaRequest:
    return QuotaRequest(id_, tenant, limits, Cost(tokens=tokens), 60 * SECOND_US, "m")


def set_clocks_off(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on this process' wall clock is wrong; Redis' is not."""
    now_s, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now_s() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + round(seconds) * 10**9)


@pytest.mark.parametrize("days", [-40, -4, -1, 1, 4, 40])
async def test_wrong_gateway_clock_uses_the_days_of_redis(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    today = datetime.now(UTC).date().isoformat()
    month = (parse_limit("tokens_per_month", 1500),)
    async with running(own_redis, keep=False) as good, running(own_redis, keep=False) as wrong:
        good.ledger.settle(
            await good.ledger.reserve(asked("good", DAY + month, 1000)), Cost(tokens=1000, inputs=1)
        )
        await good.ledger.flush()
        set_clocks_off(monkeypatch, days * 86400)
        for number in range(3):
            with pytest.raises(QuotaExceeded, match="tokens_per_day"):
                await wrong.ledger.reserve(asked(f"wrong-{number}", DAY + month, 1))
        taken = await wrong.ledger.reserve(asked("month", month, 500))
        wrong.ledger.settle(taken, Cost(tokens=500))
        await wrong.ledger.flush()
        rows = await good.ledger.usage("acme", [today])

    assert 0 == taken.limit_statuses[0].remaining
    assert 0 < taken.limit_statuses[0].reset_us <= 31 * 86400 * SECOND_US
    assert [(2, 1500)] == [(row.requests, row.tokens) for row in rows]


async def test_counts_live_gateways_by_the_clock_of_redis(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = [RedisClient(own_redis.url, 5) for _ in range(3)]
    ledgers = [RedisLedger(one, OutagePolicy(), f"g{n}", lambda _: None) for n, one in enumerate(door)]
    for number, ledger in enumerate(ledgers):
        set_clocks_off(monkeypatch, 20 * number)
        await ledger._heartbeat.beat()
    gateways = await ledgers[0]._heartbeat.beat()
    for ledger in ledgers:
        await ledger.aclose()

    assert ":3" == own_redis.command("ZCARD", "gw:gateways").strip()
    assert 3 == gateways


async def test_drops_the_local_share_when_the_store_replies(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        ledger.settle(await ledger.reserve(asked("a", tokens=100)), Cost(tokens=100))
        own_redis.freeze()
        assert (await ledger.reserve(asked("missed", tokens=1))).degraded
        own_redis.thaw()
        ledger.settle(await ledger.reserve(asked("b", tokens=800)), Cost(tokens=800))
        await ledger.flush()
        own_redis.freeze()
        with pytest.raises(QuotaExceeded) as caught:
            await ledger.reserve(asked("missed again", tokens=500))
        own_redis.thaw()

    assert "degraded" == caught.value.headers["x-quota-mode"]


@pytest.mark.parametrize(
    "harm",
    [("SET", "gw:{%s}:limits", "x"), ("HSET", "gw:{%s}:limits", "tokens_per_day=1000", "rubbish")],
    ids=["another type", "rubbish"],
)
async def test_broken_state_of_one_tenant_affects_no_other(
    redis: RedisServer, harm: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = f"bad-{secrets.token_hex(4)}", f"good-{secrets.token_hex(4)}"
    redis.command(*(word.replace("%s", bad) for word in harm))
    async with running(redis, "allow") as gateway:
        ledger = gateway.ledger
        for number in range(6):
            taken = await ledger.reserve(asked(f"bad-{number}", tenant=bad))
            assert taken.degraded
            ledger.settle(taken, Cost())
            assert not (await ledger.reserve(asked(f"good-{number}", tenant=good))).degraded
        redis.command("DEL", f"gw:{{{bad}}}:limits")
        assert not (await ledger.reserve(asked("mended", tenant=bad))).degraded

    assert [] == gateway.changes
    assert 1 == sum(bad in record.getMessage() for record in caplog.records)


async def test_closing_a_ledger_charges_local_usage(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        ledger.settle(await ledger.reserve(asked("before", tokens=100)), Cost(tokens=100))
        own_redis.freeze()
        for number in range(4):
            taken = await ledger.reserve(asked(f"local-{number}", tokens=50))
            assert taken.degraded
            ledger.settle(taken, Cost(tokens=50))
        # It is back, and no heartbeat has told so yet.
        own_redis.thaw()
    async with running(own_redis, keep=False) as another:
        assert 700 == (await another.ledger.reserve(asked("after"))).limit_statuses[0].remaining


async def test_retries_a_charge_that_failed(own_redis: RedisServer) -> None:
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        await ledger.reserve(asked("before"))
        own_redis.freeze()
        for number in range(4):
            ledger.settle(await ledger.reserve(asked(f"local-{number}", tokens=50)), Cost(tokens=50))
        for _ in range(2):
            # It departs, and nobody hears whether it arrived.
            await ledger._catch_up()
        own_redis.thaw()
        await ledger._catch_up()
        await ledger.flush()
    async with running(own_redis, keep=False) as another:
        assert 800 == (await another.ledger.reserve(asked("after"))).limit_statuses[0].remaining


async def test_outage_leaves_no_rate_in_debt_beyond_its_window(own_redis: RedisServer) -> None:
    hour = (parse_limit("tokens_per_hour", 100), parse_limit("tokens_per_month", 1000))
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        await ledger.reserve(asked("before", hour))
        own_redis.freeze()
        for number in range(6):
            # A shadow's is never refused: so the test need not wait for hours.
            ask = msgspec.structs.replace(asked(f"local-{number}", hour, 100), shadow=True)
            ledger.settle(await ledger.reserve(ask), Cost(tokens=100))
        own_redis.thaw()
        ledger._availability.record_success()
        await ledger._catch_up()
        await ledger.flush()
        rate, month = (await ledger.reserve(asked("after", hour))).limit_statuses
        rows = await ledger.usage("acme", [datetime.now(UTC).date().isoformat()])

    assert 0 == rate.remaining
    assert 3500 * SECOND_US < rate.reset_us <= 3600 * SECOND_US
    assert 400 == month.remaining
    assert [(6, 600)] == [(row.requests, row.tokens) for row in rows]


async def test_charges_local_usage_to_its_own_day(own_redis: RedisServer) -> None:
    clock = Clock(1_800_057_590 * SECOND_US)  # 2027-01-15T23:59:50Z
    limits = (*DAY, parse_limit("tokens_per_month", 5000))
    ledger = RedisLedger(RedisClient(own_redis.url, 0.1), OutagePolicy(), "gateway", lambda _: None, clock)
    await ledger.reserve(asked("before", limits))
    own_redis.freeze()
    for number in range(4):
        ledger.settle(await ledger.reserve(asked(f"local-{number}", limits, 200)), Cost(tokens=200))
    own_redis.thaw()
    clock.now_us += 30 * SECOND_US
    ledger._availability.record_success()
    await ledger._catch_up()
    await ledger.flush()
    day, month = (await ledger.reserve(asked("after", limits))).limit_statuses
    rows = await ledger.usage("acme", ["2027-01-15", "2027-01-16"])
    await ledger.aclose()

    assert (1000, 4200) == (day.remaining, month.remaining)
    assert [("2027-01-15", 800)] == [(row.day, row.tokens) for row in rows]


async def test_request_in_flight_keeps_its_slot_when_data_is_lost(own_redis: RedisServer) -> None:
    one = (parse_limit("requests_in_flight", 1), *DAY)
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        flying = await ledger.reserve(asked("flying", one, 100))
        own_redis.command("FLUSHALL")
        await ledger._renew()
        with pytest.raises(QuotaExceeded, match="requests_in_flight"):
            await ledger.reserve(asked("second", one, 1))
        ledger.settle(flying, Cost(tokens=50))
        taken = await ledger.reserve(asked("third", one, 1))

    # What the first was charged has been forgotten, and so is not given back.
    assert [0, 999] == [standing.remaining for standing in taken.limit_statuses]


async def test_late_renewal_takes_no_slot_for_a_settled_request(own_redis: RedisServer) -> None:
    one = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, keep=False) as gateway:
        ledger = gateway.ledger
        over = await ledger.reserve(asked("over", one))
        ledger.settle(over, Cost())
        await ledger.flush()
        ledger._open["over"] = over
        await ledger._renew()
        assert 0 == (await ledger.reserve(asked("next", one))).limit_statuses[0].remaining


async def test_backward_clock_step_adds_no_waiting_time(own_redis: RedisServer) -> None:
    clock = Clock(1_800_057_590 * SECOND_US)
    hour, slot = (parse_limit("tokens_per_hour", 100),), (parse_limit("requests_in_flight", 1),)
    ledger = RedisLedger(RedisClient(own_redis.url, 5), OutagePolicy(), "gateway", lambda _: None, clock)
    await ledger.reserve(asked("rate", hour, 100))
    await ledger.reserve(asked("slot", slot))
    clock.now_us -= 86400 * SECOND_US
    with pytest.raises(QuotaExceeded, match="in 36s"):
        await ledger.reserve(asked("too much", hour, 1))
    with pytest.raises(QuotaExceeded):
        await ledger.reserve(asked("too many", slot))
    clock.now_us += 1800 * SECOND_US
    half = await ledger.reserve(asked("half", hour, 50))
    free = await ledger.reserve(asked("free", slot))
    await ledger.aclose()

    assert [0, 0] == [one.limit_statuses[0].remaining for one in (half, free)]
