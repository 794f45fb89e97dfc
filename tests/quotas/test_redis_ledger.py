"""The ledgers in memory and in Redis give the same answers to the same histories."""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.errors import GatewayError
from gateway.events import Event
from gateway.quotas.ledger import LEASE_US, NOTHING, Ledger, MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import (
    SECOND_US,
    Cost,
    Limit,
    Period,
    Unit,
    period_end_us,
    period_start_us,
)
from gateway.quotas.operations import DAY_US
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script
from tests.quotas.redis_server import RedisServer

# A moment before midnight at the end of a leap year's February.
START_US = 1_709_251_190 * SECOND_US
TENANTS = ("acme", "globex")
PERIODS: tuple[Period, ...] = ("day", "month")


@dataclass
class Clock:
    """Microseconds that pass when the test says so."""

    now_us: int = START_US

    def __call__(self) -> int:
        return self.now_us


@dataclass
class Both:
    """Two ledgers that must not be told apart."""

    memory: Ledger
    redis: Ledger
    clock: Clock
    held: list[tuple[Reservation, Reservation]] = field(default_factory=list)

    async def reserve(self, ask: QuotaRequest) -> None:
        answers = [await _outcome(ledger, ask) for ledger in (self.memory, self.redis)]
        assert _shown(answers[0]) == _shown(answers[1])
        if isinstance(answers[0], Reservation) and isinstance(answers[1], Reservation):
            self.held.append((answers[0], answers[1]))

    async def settle(self, index: int, actual: Cost) -> None:
        if not self.held:
            return
        in_memory, in_redis = self.held[index % len(self.held)]
        self.memory.settle(in_memory, actual)
        for one in self.redis.settle(in_redis, actual):
            assert 0 <= one.remaining <= one.limit.amount
        await self.redis.flush()
        await self.reserve(msgspec.structs.replace(in_memory.request, id=secrets.token_hex(8), cost=NOTHING))


async def _outcome(ledger: Ledger, ask: QuotaRequest) -> Reservation | GatewayError:
    try:
        return await ledger.reserve(ask)
    except GatewayError as error:
        return error


def _shown(answer: Reservation | GatewayError) -> Any:
    if isinstance(answer, Reservation):
        return answer.limit_statuses, answer.over
    return answer.kind, answer.message, answer.retry_after_s, answer.headers


async def test_settled_statuses_are_exact_without_concurrent_requests(redis: RedisServer) -> None:
    clock = Clock()
    memory = MemoryLedger(clock, LEASE_US)
    shared = RedisLedger(RedisClient(redis.url, 5), OutagePolicy(), "test", lambda _: None, clock)
    held = (Limit("tokens", "minute", 7000), Limit("inputs", "day", 100), Limit("requests", "in_flight", 2))
    ask = QuotaRequest(
        secrets.token_hex(4), f"shown-{secrets.token_hex(4)}", held, Cost(1, 700, 9), 60 * SECOND_US
    )
    shown = [ledger.settle(await ledger.reserve(ask), Cost(1, 70, 4)) for ledger in (memory, shared)]
    await shared.aclose()

    assert shown[0] == shown[1]
    assert [6930, 96, 2] == [one.remaining for one in shown[1]]


def test_calendar_periods_agree_between_lua_and_python(redis: RedisServer) -> None:
    # Every day at noon, from before one century's missing leap day to after another's.
    days = range(-26_000, 50_000)
    source = """
        local told = {}
        for day = tonumber(ARGV[1]), tonumber(ARGV[2]) do
          local noon = day * DAY_US + DAY_US / 2
          for _, name in ipairs({'day', 'month'}) do
            for _, moment in ipairs({period({p = name}, noon)}) do told[#told + 1] = moment / DAY_US end
          end
        end
        return told
    """
    with Redis(port=redis.port) as client:
        told = client.eval(load_script("meters").source + source, 0, days[0], days[-1])
    expected = []
    for day in days:
        noon_us = day * DAY_US + DAY_US // 2
        for name in PERIODS:
            expected += [period_start_us(name, noon_us) // DAY_US, period_end_us(name, noon_us) // DAY_US]

    assert expected == told


units: st.SearchStrategy[Unit] = st.sampled_from(("requests", "tokens", "inputs"))
periods: st.SearchStrategy[Period] = st.sampled_from(("second", "minute", "hour", "day", "month"))
limits = st.one_of(
    st.builds(Limit, units, periods, st.sampled_from((1, 3, 7, 60, 1000, 999_983, 2_000_000_000))),
    st.builds(Limit, st.just("requests"), st.just("in_flight"), st.integers(1, 4)),
)
costs = st.builds(Cost, st.integers(0, 3), st.integers(0, 1200), st.integers(0, 40))
steps = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from((1, 999, SECOND_US, 7 * SECOND_US, 61 * SECOND_US, LEASE_US))),
    st.tuples(st.just("reserve"), st.sampled_from(TENANTS), costs, st.booleans()),
    st.tuples(st.just("again"), st.integers(0, 50)),
    st.tuples(st.just("settle"), st.integers(0, 50), costs),
)


@settings(max_examples=120, deadline=None)
@given(
    held=st.lists(limits, min_size=1, max_size=4, unique_by=lambda limit: limit.name),
    history=st.lists(steps, max_size=40),
)
def test_both_ledgers_agree_on_random_histories(
    redis: RedisServer, held: list[Limit], history: list[tuple[Any, ...]]
) -> None:
    asyncio.run(play(redis, tuple(held), history))


async def play(redis: RedisServer, held: tuple[Limit, ...], history: list[tuple[Any, ...]]) -> None:
    clock, events = Clock(), list[Event]()
    door = RedisClient(redis.url, timeout_s=5)
    in_redis = RedisLedger(door, OutagePolicy(), "test", events.append, clock)
    both = Both(MemoryLedger(clock, LEASE_US), in_redis, clock)
    # Tenants of their own, so that one history does not see another's.
    run = secrets.token_hex(4)
    try:
        for number, step in enumerate(history):
            match step:
                case ("wait", passed_us):
                    clock.now_us += passed_us
                case ("reserve", tenant, cost, shadow):
                    ask = QuotaRequest(
                        f"{run}{number}", f"{tenant}-{run}", held, cost, 60 * SECOND_US, "m", shadow
                    )
                    await both.reserve(ask)
                case ("again", index) if both.held:
                    await both.reserve(both.held[index % len(both.held)][0].request)
                case ("settle", index, cost):
                    await both.settle(index, cost)
        days = ["2024-02-29", "2024-03-01"]
        for tenant in TENANTS:
            name = f"{tenant}-{run}"
            used = [
                row for row in await both.memory.usage(name, days) if row.requests or row.tokens or row.inputs
            ]
            assert used == await both.redis.usage(name, days)
    finally:
        await in_redis.aclose()
    assert not events
