"""Redis slow, frozen, killed, emptied, full or restarted: callers see the configured outage policy."""

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
from gateway.quotas.local_share import LocalShare
from gateway.quotas.redis_ledger import FLUSH_S, OutagePolicy, RedisLedger, WhenUnavailable
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script
from tests.quotas.redis_server import RedisServer
from tests.quotas.test_redis_ledger import Clock
from tests.waiting import PATIENCE_S

LIMITS = (parse_limit("requests_per_hour", 3600), parse_limit("tokens_per_day", 1000))
Trouble = Callable[[RedisServer], object]


class Running:
    """A ledger with its background work, and its events."""

    def __init__(self, ledger: RedisLedger, events: list[Event]) -> None:
        self.ledger = ledger
        self.events = events
        self._number = 0

    async def call(self, tokens: int = 1) -> bool:
        """Reserve and settle one request; return True if it was counted without the store."""
        self._number += 1
        request = QuotaRequest(
            f"{id(self)}-{self._number}", "acme", LIMITS, Cost(tokens=tokens), 60 * SECOND_US, "m"
        )
        reservation = await self.ledger.reserve(request)
        self.ledger.settle(reservation, Cost(tokens=tokens))
        return reservation.degraded

    @property
    def changes(self) -> list[bool]:
        """Each change of the store: down (True) or up."""
        return [event.away for event in self.events if isinstance(event, StoreChanged)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the background work, which runs once a second."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - maintain() has no event
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    server: RedisServer, when: WhenUnavailable = "local", *, maintain: bool = True, name: str = "gateway"
) -> AsyncIterator[Running]:
    events: list[Event] = []
    ledger = RedisLedger(RedisClient(server.url, 0.1), OutagePolicy(when), name, events.append)
    maintaining = asyncio.create_task(ledger.maintain()) if maintain else None
    try:
        yield Running(ledger, events)
    finally:
        if maintaining is not None:
            maintaining.cancel()
            await asyncio.gather(maintaining, return_exceptions=True)
        await ledger.aclose()


async def try_repeatedly(attempt: Callable[[], Awaitable[object]], times: int) -> None:
    """Make failures add up; refusals are expected, because a local share starts without a burst."""
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
    async with running(own_redis, "allow", maintain=False) as gateway:
        assert not await gateway.call()
        trouble(own_redis)
        assert [True] * 6 == [await gateway.call() for _ in range(6)]

    assert [True] == gateway.changes


async def test_one_late_reply_does_not_refuse_an_idle_tenant(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
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


async def test_local_policy_admits_its_share_of_the_remaining_amount(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call(400)
        own_redis.kill()
        await try_repeatedly(gateway.call, 3)
        set_clocks_off(monkeypatch, 1)
        assert await gateway.call(550)
        set_clocks_off(monkeypatch, 1)
        with pytest.raises(QuotaExceeded, match="tokens_per_day"):
            await gateway.call(100)


async def test_charges_local_usage_after_an_outage(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(own_redis) as gateway:
        await gateway.call(100)
        own_redis.freeze()
        await try_repeatedly(gateway.call, 4)
        assert [True] == gateway.changes
        set_clocks_off(monkeypatch, 1)
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
        await try_repeatedly(gateway.call, 4)
        own_redis.restart()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call()


async def test_full_server_stays_down_until_it_accepts_writes(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        await gateway.call()
        FULL(own_redis)
        await try_repeatedly(gateway.call, 4)
        beats = scripts(own_redis) + 3
        # The heartbeat tries it every second.
        await gateway.until(lambda: scripts(own_redis) >= beats)
        assert [True] == gateway.changes
        own_redis.command("CONFIG", "SET", "maxmemory", "0")
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call()


async def test_settles_requests_in_flight_after_an_outage(own_redis: RedisServer) -> None:
    async with running(own_redis) as gateway:
        request = QuotaRequest("flying", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US, "m")
        reservation = await gateway.ledger.reserve(request)
        own_redis.freeze()
        gateway.ledger.settle(reservation, Cost(tokens=100))
        await try_repeatedly(gateway.call, 4)
        own_redis.thaw()
        await gateway.until(lambda: gateway.changes == [True, False])
        assert not await gateway.call(800)


async def test_closing_a_ledger_sends_unsent_settlements(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call(900)
        reservation = await gateway.ledger.reserve(
            QuotaRequest("last", "acme", LIMITS, Cost(tokens=100), SECOND_US)
        )
        gateway.ledger.settle(reservation, Cost(tokens=40))
    async with running(own_redis, maintain=False) as later:
        assert not await later.call(60)
        with pytest.raises(QuotaExceeded):
            await later.call(1)


async def test_closing_a_ledger_does_not_wait_for_a_store_outage(own_redis: RedisServer) -> None:
    async with asyncio.timeout(PATIENCE_S), running(own_redis, maintain=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        closing_s = time.monotonic()

    # One timeout of 0.1 s per attempt, and never the two seconds that a slow flush may take.
    assert time.monotonic() - closing_s < FLUSH_S


async def test_slot_is_free_for_the_next_request_of_the_same_turn(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, maintain=False) as gateway:
        for number in range(20):
            request = QuotaRequest(f"slot-{number}", "acme", limits, Cost(), 60 * SECOND_US)
            gateway.ledger.settle(await gateway.ledger.reserve(request), Cost())


async def test_cancelled_reserve_holds_nothing(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, maintain=False) as gateway:
        reserving = asyncio.create_task(
            gateway.ledger.reserve(QuotaRequest("gone", "acme", limits, Cost(), 60 * SECOND_US))
        )
        for _ in range(3):
            # It is sent in one of the next turns.
            await asyncio.sleep(0)
        reserving.cancel()
        await asyncio.gather(reserving, return_exceptions=True)
        await gateway.ledger.flush()
        reservation = await gateway.ledger.reserve(
            QuotaRequest("next", "acme", limits, Cost(), 60 * SECOND_US)
        )

    assert 0 == reservation.limit_statuses[0].remaining


async def test_reserve_received_after_its_refund_takes_nothing(own_redis: RedisServer) -> None:
    late = QuotaRequest("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", maintain=False) as gateway:
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.kill()
        own_redis.restart()
        # The store has lost it and receives the refund; the reserve itself arrives afterwards.
        await gateway.ledger.flush()
    async with running(own_redis, maintain=False) as later:
        await later.ledger.reserve(late)
        assert not await later.call(1000)


async def test_timed_out_reserve_holds_nothing_afterwards(own_redis: RedisServer) -> None:
    late = QuotaRequest("late", "acme", LIMITS, Cost(tokens=900), 60 * SECOND_US)
    async with running(own_redis, "allow", maintain=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        assert (await gateway.ledger.reserve(late)).degraded
        own_redis.thaw()
        await gateway.ledger.flush()
        assert not await gateway.call(999)


async def test_requests_queued_behind_a_failed_batch_are_served_locally(
    own_redis: RedisServer,
) -> None:
    async with running(own_redis, "allow", maintain=False) as gateway:
        await gateway.call()
        own_redis.freeze()
        waiting = []
        for number in range(40):
            request = QuotaRequest(
                f"{number}", f"tenant-{number % 20}", LIMITS, Cost(tokens=1), 60 * SECOND_US
            )
            waiting.append(asyncio.create_task(gateway.ledger.reserve(request)))
            # Each turn sends another batch until two are on the way.
            await asyncio.sleep(0)
        degraded = await asyncio.gather(*waiting)
        own_redis.thaw()
        await gateway.ledger.flush()
        unaffected = [
            await gateway.ledger.reserve(
                QuotaRequest(f"w{n}", f"tenant-{n}", LIMITS, Cost(tokens=1000), SECOND_US)
            )
            for n in range(20)
        ]

    assert all(reservation.degraded for reservation in degraded)
    assert not any(reservation.degraded for reservation in unaffected)


async def test_splits_many_reserves_over_several_script_calls(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_per_day", 1000),)
    async with running(own_redis, maintain=False) as gateway:
        requests = [QuotaRequest(f"many-{n}", "acme", limits, Cost(), 60 * SECOND_US) for n in range(300)]
        reservations = await asyncio.gather(*(gateway.ledger.reserve(request) for request in requests))
        for reservation in reservations:
            gateway.ledger.settle(reservation, Cost(requests=0))
        await gateway.ledger.flush()
        probe = await gateway.ledger.reserve(QuotaRequest("probe", "acme", limits, Cost(), 60 * SECOND_US))

    assert sorted(range(700, 1000)) == sorted(
        reservation.limit_statuses[0].remaining for reservation in reservations
    )
    assert 999 == probe.limit_statuses[0].remaining


async def test_batches_reserves_of_one_turn(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call()
        before = reads(own_redis)
        await asyncio.gather(*(gateway.call(0) for _ in range(100)))

    # 100 reserves and 100 settlements would be more than 200 reads without batches.
    assert reads(own_redis) - before < 60


async def test_sends_a_reserve_before_a_busy_loop_continues(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call()
        await gateway.ledger.flush()
        before = scripts(own_redis)
        request = QuotaRequest("now", "acme", LIMITS, Cost(), 60 * SECOND_US, "m")
        reserving = asyncio.create_task(gateway.ledger.reserve(request))
        # The reserve is queued in one turn and sent in the next; then the loop is busy.
        for _ in range(2):
            await asyncio.sleep(0)
        ends_s = time.monotonic() + 5
        while scripts(own_redis) == before and time.monotonic() < ends_s:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop has to be busy
        seen = scripts(own_redis) - before
        gateway.ledger.settle(await reserving, Cost())

    assert 1 == seen


@pytest.mark.parametrize(
    ("slots", "more", "expected"),
    [(1, 0, 1), (63, 0, 1), (65, 0, 0), (65, 1, 1), (1000, 0, 0), (1000, 499, 0), (1000, 500, 1)],
)
async def test_returns_a_scarce_slot_at_once(
    own_redis: RedisServer, slots: int, more: int, expected: int
) -> None:
    limits = (parse_limit("requests_in_flight", 4000, "key a "), parse_limit("requests_in_flight", slots))
    async with running(own_redis, maintain=False) as gateway, running(own_redis, maintain=False) as other:
        reservation = await gateway.ledger.reserve(
            QuotaRequest("one", "acme", limits, Cost(), 60 * SECOND_US)
        )
        requests = [QuotaRequest(f"more-{n}", "acme", limits, Cost(), 60 * SECOND_US) for n in range(more)]
        await asyncio.gather(*(gateway.ledger.reserve(request) for request in requests))
        before = scripts(own_redis)
        gateway.ledger.settle(reservation, Cost())
        # Calls of one turn are queued together, and sent in the next.
        for _ in range(2):
            await asyncio.sleep(0)
        seen = scripts(own_redis) - before
        await gateway.ledger.flush()
        next_one = await other.ledger.reserve(QuotaRequest("two", "acme", limits, Cost(), 60 * SECOND_US))

    assert expected == seen
    assert slots - 1 - more == next_one.limit_statuses[1].remaining


@pytest.mark.parametrize("turns", [0, 1, 2, 10], ids=lambda turns: f"{turns} turns before")
async def test_retries_once_on_a_lost_idle_connection(own_redis: RedisServer, turns: int) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call()
        await gateway.ledger.flush()
        checking = asyncio.create_task(gateway.call())
        # After one turn the call is written to a connection whose end has not been noticed yet.
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
    client = RedisClient(own_redis.url, 0.5)
    program = Script("return ARGV[1]", hashlib.sha1(b"return ARGV[1]", usedforsecurity=False).hexdigest())
    try:
        for _ in range(2):
            assert b"well" == await client.run_script(program, ["a"], b"well")
            with pytest.raises(StoreUnavailable):
                await client.run_script(program, ["\ud800"], b"odd")
        assert b"well" == await client.run_script(program, ["a"], b"well")
    finally:
        await client.aclose()


def scripts(server: RedisServer) -> int:
    """Return how many scripts the server has run by EVALSHA."""
    lines = server.command("INFO", "commandstats").splitlines()
    found = next((line for line in lines if line.startswith("cmdstat_evalsha:")), "calls=0,")
    return int(found.partition("calls=")[2].partition(",")[0])


def reads(server: RedisServer) -> int:
    """Return how often the server has read from a socket: rarely if calls are batched."""
    lines = server.command("INFO", "stats").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("total_reads_processed"))


async def test_four_gateways_never_exceed_a_limit(own_redis: RedisServer) -> None:
    limits = (parse_limit("tokens_per_day", 5000), parse_limit("requests_in_flight", 7))
    clients = [RedisClient(own_redis.url, 5) for _ in range(4)]
    ledgers = [
        RedisLedger(client, OutagePolicy(), f"g{i}", lambda _: None) for i, client in enumerate(clients)
    ]
    admitted, flying, most = 0, 0, 0

    async def call(number: int) -> None:
        nonlocal admitted, flying, most
        ledger, cost = ledgers[number % 4], Cost(tokens=number % 37)
        try:
            reservation = await ledger.reserve(
                QuotaRequest(str(number), "acme", limits, cost, 60 * SECOND_US)
            )
        except QuotaExceeded:
            return
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0)
        flying -= 1
        admitted += number % 37 // 2
        ledger.settle(reservation, Cost(tokens=number % 37 // 2))

    for start in range(0, 1200, 64):
        await asyncio.gather(*(call(number) for number in range(start, start + 64)))
    for ledger in ledgers:
        await ledger.aclose()

    assert 0 < admitted <= 5000
    assert 0 < most <= 7


DAY = (parse_limit("tokens_per_day", 1000),)


def quota_request(
    id_: str, limits: tuple[Limit, ...] = DAY, tokens: int = 0, tenant: str = "acme"
) -> QuotaRequest:
    return QuotaRequest(id_, tenant, limits, Cost(tokens=tokens), 60 * SECOND_US, "m")


def set_clocks_off(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Move the wall clock of this process; the clock of Redis stays."""
    now_s, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now_s() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + round(seconds) * 10**9)


@pytest.mark.parametrize("days", [-40, -4, -1, 1, 4, 40])
async def test_wrong_gateway_clock_uses_the_days_of_redis(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    today = datetime.now(UTC).date().isoformat()
    month = (parse_limit("tokens_per_month", 1500),)
    async with running(own_redis, maintain=False) as good, running(own_redis, maintain=False) as wrong:
        good.ledger.settle(
            await good.ledger.reserve(quota_request("good", DAY + month, 1000)), Cost(tokens=1000, inputs=1)
        )
        await good.ledger.flush()
        set_clocks_off(monkeypatch, days * 86400)
        for number in range(3):
            with pytest.raises(QuotaExceeded, match="tokens_per_day"):
                await wrong.ledger.reserve(quota_request(f"wrong-{number}", DAY + month, 1))
        reservation = await wrong.ledger.reserve(quota_request("month", month, 500))
        wrong.ledger.settle(reservation, Cost(tokens=500))
        await wrong.ledger.flush()
        rows = await good.ledger.usage("acme", [today])

    assert 0 == reservation.limit_statuses[0].remaining
    assert 0 < reservation.limit_statuses[0].reset_us <= 31 * 86400 * SECOND_US
    assert [(2, 1500)] == [(row.requests, row.tokens) for row in rows]


async def test_counts_live_gateways_by_the_clock_of_redis(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [RedisClient(own_redis.url, 5) for _ in range(3)]
    ledgers = [
        RedisLedger(client, OutagePolicy(), f"g{n}", lambda _: None) for n, client in enumerate(clients)
    ]
    for number, ledger in enumerate(ledgers):
        set_clocks_off(monkeypatch, 20 * number)
        await ledger.beat()
    gateways = await ledgers[0].beat()
    for ledger in ledgers:
        await ledger.aclose()

    assert ":3" == own_redis.command("ZCARD", "gw:gateways").strip()
    assert 3 == gateways


async def test_drops_the_local_share_when_the_store_replies(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        ledger.settle(await ledger.reserve(quota_request("a", tokens=100)), Cost(tokens=100))
        own_redis.freeze()
        assert (await ledger.reserve(quota_request("missed", tokens=1))).degraded
        own_redis.thaw()
        ledger.settle(await ledger.reserve(quota_request("b", tokens=800)), Cost(tokens=800))
        await ledger.flush()
        own_redis.freeze()
        with pytest.raises(QuotaExceeded) as caught:
            await ledger.reserve(quota_request("missed again", tokens=500))
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
            reservation = await ledger.reserve(quota_request(f"bad-{number}", tenant=bad))
            assert reservation.degraded
            ledger.settle(reservation, Cost())
            assert not (await ledger.reserve(quota_request(f"good-{number}", tenant=good))).degraded
        redis.command("DEL", f"gw:{{{bad}}}:limits")
        assert not (await ledger.reserve(quota_request("mended", tenant=bad))).degraded

    assert [] == gateway.changes
    assert 1 == sum(bad in record.getMessage() for record in caplog.records)


async def test_closing_a_ledger_charges_local_usage(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        ledger.settle(await ledger.reserve(quota_request("before", tokens=100)), Cost(tokens=100))
        own_redis.freeze()
        for number in range(4):
            reservation = await ledger.reserve(quota_request(f"local-{number}", tokens=50))
            assert reservation.degraded
            ledger.settle(reservation, Cost(tokens=50))
        # The store is up, and no heartbeat has noticed yet.
        own_redis.thaw()
    async with running(own_redis, maintain=False) as later:
        assert 700 == (await later.ledger.reserve(quota_request("after"))).limit_statuses[0].remaining


async def test_retries_a_charge_that_failed(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        await ledger.reserve(quota_request("before"))
        own_redis.freeze()
        for number in range(4):
            ledger.settle(await ledger.reserve(quota_request(f"local-{number}", tokens=50)), Cost(tokens=50))
        for _ in range(2):
            # The charge is sent, and its reply is lost.
            await ledger._catch_up()
        own_redis.thaw()
        await ledger._catch_up()
        await ledger.flush()
    async with running(own_redis, maintain=False) as later:
        assert 800 == (await later.ledger.reserve(quota_request("after"))).limit_statuses[0].remaining


async def test_outage_leaves_no_rate_in_debt_beyond_its_window(own_redis: RedisServer) -> None:
    hour = (parse_limit("tokens_per_hour", 100), parse_limit("tokens_per_month", 1000))
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        await ledger.reserve(quota_request("before", hour))
        own_redis.freeze()
        for number in range(6):
            # A shadow request is never refused: the test need not wait for hours.
            request = msgspec.structs.replace(quota_request(f"local-{number}", hour, 100), shadow=True)
            ledger.settle(await ledger.reserve(request), Cost(tokens=100))
        own_redis.thaw()
        ledger._availability.record_success()
        await ledger._catch_up()
        await ledger.flush()
        rate, month = (await ledger.reserve(quota_request("after", hour))).limit_statuses
        rows = await ledger.usage("acme", [datetime.now(UTC).date().isoformat()])

    assert 0 == rate.remaining
    assert 3500 * SECOND_US < rate.reset_us <= 3600 * SECOND_US
    assert 400 == month.remaining
    assert [(6, 600)] == [(row.requests, row.tokens) for row in rows]


async def test_charges_local_usage_to_its_own_day(own_redis: RedisServer) -> None:
    clock = Clock(1_800_057_590 * SECOND_US)  # 2027-01-15T23:59:50Z
    limits = (*DAY, parse_limit("tokens_per_month", 5000))
    ledger = RedisLedger(RedisClient(own_redis.url, 0.1), OutagePolicy(), "gateway", lambda _: None, clock)
    await ledger.reserve(quota_request("before", limits))
    own_redis.freeze()
    for number in range(4):
        ledger.settle(await ledger.reserve(quota_request(f"local-{number}", limits, 200)), Cost(tokens=200))
    own_redis.thaw()
    clock.now_us += 30 * SECOND_US
    ledger._availability.record_success()
    await ledger._catch_up()
    await ledger.flush()
    day, month = (await ledger.reserve(quota_request("after", limits))).limit_statuses
    rows = await ledger.usage("acme", ["2027-01-15", "2027-01-16"])
    await ledger.aclose()

    assert (1000, 4200) == (day.remaining, month.remaining)
    assert [("2027-01-15", 800)] == [(row.day, row.tokens) for row in rows]


async def test_request_in_flight_keeps_its_slot_when_data_is_lost(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1), *DAY)
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        flying = await ledger.reserve(quota_request("flying", limits, 100))
        own_redis.command("FLUSHALL")
        await ledger._renew()
        with pytest.raises(QuotaExceeded, match="requests_in_flight"):
            await ledger.reserve(quota_request("second", limits, 1))
        ledger.settle(flying, Cost(tokens=50))
        reservation = await ledger.reserve(quota_request("third", limits, 1))

    # The charge of the first request was lost, and therefore is not given back.
    assert [0, 999] == [status.remaining for status in reservation.limit_statuses]


async def test_late_renewal_takes_no_slot_for_a_settled_request(own_redis: RedisServer) -> None:
    limits = (parse_limit("requests_in_flight", 1),)
    async with running(own_redis, maintain=False) as gateway:
        ledger = gateway.ledger
        over = await ledger.reserve(quota_request("over", limits))
        ledger.settle(over, Cost())
        await ledger.flush()
        ledger._open["over"] = over
        await ledger._renew()
        assert 0 == (await ledger.reserve(quota_request("next", limits))).limit_statuses[0].remaining


async def test_backward_clock_step_adds_no_waiting_time(own_redis: RedisServer) -> None:
    clock = Clock(1_800_057_590 * SECOND_US)
    hour, slot = (parse_limit("tokens_per_hour", 100),), (parse_limit("requests_in_flight", 1),)
    ledger = RedisLedger(RedisClient(own_redis.url, 5), OutagePolicy(), "gateway", lambda _: None, clock)
    await ledger.reserve(quota_request("rate", hour, 100))
    await ledger.reserve(quota_request("slot", slot))
    clock.now_us -= 86400 * SECOND_US
    with pytest.raises(QuotaExceeded, match="in 36s"):
        await ledger.reserve(quota_request("too much", hour, 1))
    with pytest.raises(QuotaExceeded):
        await ledger.reserve(quota_request("too many", slot))
    clock.now_us += 1800 * SECOND_US
    half = await ledger.reserve(quota_request("half", hour, 50))
    free = await ledger.reserve(quota_request("free", slot))
    await ledger.aclose()

    assert [0, 0] == [reservation.limit_statuses[0].remaining for reservation in (half, free)]


ONE_REQUEST = (parse_limit("requests_per_hour", 1),)


async def spend(ledger: RedisLedger, times: int = 2) -> list[bool]:
    """Reserve one request this often, and return which were admitted."""
    admitted = []
    for _ in range(times):
        request = QuotaRequest(secrets.token_hex(4), "acme", ONE_REQUEST, Cost(), 60 * SECOND_US, "m")
        try:
            ledger.settle(await ledger.reserve(request), Cost())
            admitted.append(True)
        except QuotaExceeded:
            admitted.append(False)
    return admitted


async def test_a_spent_tenant_is_refused_without_a_trip(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway, running(own_redis, maintain=False) as other:
        assert [True, False] == await spend(gateway.ledger)
        await gateway.ledger.flush()
        await spend(gateway.ledger, 1)
        before = scripts(own_redis)
        with pytest.raises(QuotaExceeded, match=r"requests_per_hour \(1\): nothing is left") as caught:
            gateway.ledger.refuse_if_spent("acme", ONE_REQUEST, Cost())
        # It knows only what it has seen itself.
        other.ledger.refuse_if_spent("acme", ONE_REQUEST, Cost())

        assert before == scripts(own_redis)
    assert "0" == caught.value.headers["x-ratelimit-remaining-requests"]


async def test_a_spent_share_is_refused_without_the_store(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        await gateway.call()
        own_redis.kill()
        await try_repeatedly(gateway.call, 4)
        assert [True, False] == await spend(gateway.ledger)
        with pytest.raises(QuotaExceeded) as caught:
            gateway.ledger.refuse_if_spent("acme", ONE_REQUEST, Cost())

    assert "degraded" == caught.value.headers["x-quota-mode"]


TEN = (parse_limit("requests_per_minute", 10),)


async def admitted(ledger: RedisLedger, tenant: str, times: int) -> int:
    """Return how many of these calls are admitted."""
    number = 0
    for _ in range(times):
        request = QuotaRequest(secrets.token_hex(4), tenant, TEN, Cost(), SECOND_US)
        with suppress(QuotaExceeded):
            ledger.settle(await ledger.reserve(request), Cost())
            number += 1
    return number


async def test_idle_tenants_keep_their_limits_while_the_store_is_down(own_redis: RedisServer) -> None:
    async with running(own_redis) as one, running(own_redis, name="two") as two:
        # Both know of each other after their second heartbeats.
        async with asyncio.timeout(PATIENCE_S):
            while {one.ledger._gateways, two.ledger._gateways} != {2}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for number in range(10):
            assert 1 == await admitted(one.ledger, f"team{number}", 1)
        own_redis.kill()
        for gateway in (one, two):
            await try_repeatedly(gateway.call, 4)
            assert [True] == gateway.changes
        found = [
            [await admitted(gateway.ledger, f"team{number}", 4) for number in range(20)]
            for gateway in (one, two)
        ]

    # Ten were called before, of which one in ten is used; ten were never seen.
    assert [[4] * 20] * 2 == found


@pytest.mark.parametrize(("used", "each"), [(0, 5), (1, 5), (4, 3), (7, 2), (9, 1), (10, 0)])
async def test_a_share_starts_with_its_part_of_what_is_left(used: int, each: int) -> None:
    share = LocalShare()
    share.record("acme", [(TEN[0], (used * 6 * SECOND_US, 0))], is_down=False)

    assert each == await admitted_share(share, 10)


async def test_a_share_has_refilled_since_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    share = LocalShare()
    share.record("acme", [(TEN[0], (60 * SECOND_US, 0))], is_down=False)
    set_clocks_off(monkeypatch, 24)

    # Four have come back, of which this gateway has half.
    assert 2 == await admitted_share(share, 10)


def share_request(limit: Limit, cost: Cost) -> QuotaRequest:
    return QuotaRequest(secrets.token_hex(4), "acme", (limit,), cost, 60 * SECOND_US)


@pytest.mark.parametrize(("amount", "tokens"), [(2000, 1512), (2000, 2000), (6, 6), (1, 1)])
async def test_a_full_share_admits_one_call_that_fits_only_the_whole_rate(
    monkeypatch: pytest.MonkeyPatch, amount: int, tokens: int
) -> None:
    start_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: start_ns)
    share, cost = LocalShare(), Cost(tokens=tokens)
    limit = parse_limit("tokens_per_minute", amount)
    share.settle(await share.reserve(share_request(limit, cost), 2), cost, "2026-11-27")

    # The debt is paid at the rate of the share, and no other call passes before.
    part = -(-amount // 2)
    wait_s = -(-60 * tokens // part)
    with pytest.raises(QuotaExceeded, match=f"try again in {wait_s // 60}m{wait_s % 60}s"):
        await share.reserve(share_request(limit, cost), 2)
    with pytest.raises(QuotaExceeded):
        await share.reserve(share_request(limit, Cost(tokens=1)), 2)
    monkeypatch.setattr(time, "time_ns", lambda: start_ns + wait_s * 10**9)
    assert (await share.reserve(share_request(limit, cost), 2)).degraded


async def test_gateways_overshoot_a_rate_by_one_large_call_each() -> None:
    limit, cost, gateways = parse_limit("tokens_per_minute", 2000), Cost(tokens=1512), 2
    admitted_tokens = 0
    for share in [LocalShare() for _ in range(gateways)]:
        for _ in range(20):
            with suppress(QuotaExceeded):
                share.settle(await share.reserve(share_request(limit, cost), gateways), cost, "2026-11-27")
                admitted_tokens += cost.tokens

    assert admitted_tokens == gateways * cost.tokens


async def test_a_refunded_large_call_leaves_its_share_full() -> None:
    share, limit, cost = LocalShare(), parse_limit("tokens_per_minute", 2000), Cost(tokens=1512)
    for _ in range(3):
        share.settle(await share.reserve(share_request(limit, cost), 2), Cost(requests=0), "2026-11-27")


async def test_a_day_without_a_share_names_the_reason_and_no_false_wait() -> None:
    share = LocalShare()
    limit = parse_limit("requests_per_day", 1)
    with pytest.raises(QuotaExceeded) as unused:
        await share.reserve(share_request(limit, Cost()), 2)
    share.record("acme", [(limit, (1, 3600 * SECOND_US))], is_down=True)
    with pytest.raises(QuotaExceeded) as spent:
        await share.reserve(share_request(limit, Cost()), 2)

    assert unused.value.message == (
        "limit requests_per_day (1): this gateway may admit 0 of it, and this call costs 1 request; "
        "it may pass when the store is available again"
    )
    assert unused.value.retry_after_s == 10
    assert "nothing is left, and this call costs 1 request; it starts again on " in spent.value.message


async def admitted_share(share: LocalShare, times: int) -> int:
    number = 0
    for _ in range(times):
        request = QuotaRequest(secrets.token_hex(4), "acme", TEN, Cost(), SECOND_US)
        with suppress(QuotaExceeded):
            share.settle(await share.reserve(request, 2), Cost(), "2026-11-27")
            number += 1
    return number


async def test_refuse_policy_refuses_before_a_reserve(own_redis: RedisServer) -> None:
    async with running(own_redis, "refuse", maintain=False) as gateway:
        gateway.ledger.refuse_if_spent("acme", ONE_REQUEST, Cost())
        own_redis.kill()
        await try_repeatedly(gateway.call, 4)
        with pytest.raises(QuotaUnavailable):
            gateway.ledger.refuse_if_spent("acme", ONE_REQUEST, Cost())


async def test_a_cost_without_a_model_leaves_no_usage(own_redis: RedisServer) -> None:
    async with running(own_redis, maintain=False) as gateway:
        bad = QuotaRequest("bad", "acme", LIMITS, Cost(), 60 * SECOND_US)
        gateway.ledger.settle(await gateway.ledger.reserve(bad), Cost())
        await gateway.call()
        rows = await gateway.ledger.usage("acme", [datetime.now(UTC).date().isoformat()])

    assert [("m", 1)] == [(row.model, row.requests) for row in rows]
