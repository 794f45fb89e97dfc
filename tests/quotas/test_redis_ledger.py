"""The ledgers in memory and in Redis return the same results for the same histories."""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.config.money import BUDGET_MAX, NANO
from gateway.errors import GatewayError
from gateway.events import BudgetAlert, Event
from gateway.quotas.end_users import EndUser
from gateway.quotas.ledger import LEASE_US, NOTHING, Ledger, MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import (
    AMOUNT_MAX,
    SECOND_US,
    UNITS,
    Cost,
    Limit,
    Period,
    Unit,
    period_end_us,
    period_start_us,
)
from gateway.quotas.operations import DAY_US, keys_of, usage_key, user_limits_key
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.quotas.usage import UsageBy, UsageRow
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script
from tests.quotas.redis_server import RedisServer

# Shortly before midnight at the end of February in a leap year.
START_US = 1_709_251_190 * SECOND_US
TENANTS = ("acme", "globex")
BY: tuple[UsageBy, ...] = ("model", "key", "end_user")
PERIODS: tuple[Period, ...] = ("day", "month")


@dataclass
class Clock:
    """Clock in microseconds that the test advances."""

    now_us: int = START_US

    def __call__(self) -> int:
        return self.now_us


@dataclass
class Both:
    """Two ledgers that have to agree."""

    memory: Ledger
    redis: Ledger
    clock: Clock
    open: list[tuple[Reservation, Reservation]] = field(default_factory=list)

    async def reserve(self, request: QuotaRequest) -> None:
        outcomes = [await _outcome(ledger, request) for ledger in (self.memory, self.redis)]
        assert _shown(outcomes[0]) == _shown(outcomes[1])
        if isinstance(outcomes[0], Reservation) and isinstance(outcomes[1], Reservation):
            self.open.append((outcomes[0], outcomes[1]))

    async def settle(self, index: int, actual: Cost) -> None:
        if not self.open:
            return
        in_memory, in_redis = self.open[index % len(self.open)]
        self.memory.settle(in_memory, actual)
        for status in self.redis.settle(in_redis, actual):
            assert 0 <= status.remaining <= status.limit.amount
        await self.redis.flush()
        await self.reserve(msgspec.structs.replace(in_memory.request, id=secrets.token_hex(8), cost=NOTHING))

    async def take_step(
        self, step: tuple[Any, ...], id_: str, run: str, limits: tuple[Limit, ...], of_users: list[Limit]
    ) -> None:
        match step:
            case ("wait", passed_us):
                self.clock.now_us += passed_us
            case ("reserve", tenant, cost, shadow, user):
                own = () if user is None else tuple(each.for_end_user(user) for each in of_users)
                request = QuotaRequest(
                    id_,
                    f"{tenant}-{run}",
                    limits + own,
                    cost,
                    60 * SECOND_US,
                    "m",
                    shadow,
                    key=("", "laptop", "batch")[len(self.open) % 3],
                    end_user=None if user is None else EndUser(user, MOST_USERS),
                )
                await self.reserve(request)
            case ("forget", tenant, user):
                names = (user, "nobody")
                in_memory = await self.memory.forget_end_user(f"{tenant}-{run}", names)
                assert in_memory == await self.redis.forget_end_user(f"{tenant}-{run}", names)
            case ("again", index) if self.open:
                await self.reserve(self.open[index % len(self.open)][0].request)
            case ("settle", index, cost):
                await self.settle(index, cost)

    async def check_usage(self, tenant: str) -> None:
        days, totals, used = ["2024-02-29", "2024-03-01"], {}, list[UsageRow]()
        for by in BY:
            used = [
                row
                for row in await self.memory.usage(tenant, days, by)
                if row.requests or row.tokens or row.inputs or row.images or row.cost
            ]
            assert used == await self.redis.usage(tenant, days, by)
            totals[by] = sum(row.tokens for row in used)
        assert totals["model"] == totals["key"] >= totals["end_user"]
        for day in days:
            names = {row.end_user for row in used if row.day == day} - {"other"}
            assert names <= {*USERS}
            assert len(names) <= MOST_USERS

    async def check_states(self, tenant: str, limits: tuple[Limit, ...]) -> None:
        before = await self.memory.limit_states({tenant: limits, "none": limits})
        assert before == await self.redis.limit_states({tenant: limits, "none": limits})
        # Looking changes nothing.
        assert before == await self.redis.limit_states({tenant: limits, "none": limits})

    async def check_sums(self, tenants: list[str]) -> None:
        days = ["2024-03-01", "2024-02-29"]
        sums = await self.memory.usage_sums(tenants, days)
        assert sums == await self.redis.usage_sums(tenants, days)
        for tenant in tenants:
            rows = await self.redis.usage(tenant, days)
            assert sums[tenant].total.tokens == sum(row.tokens for row in rows)
            assert sums[tenant].latest.requests == sum(row.requests for row in rows if row.day == days[0])


async def _outcome(ledger: Ledger, request: QuotaRequest) -> Reservation | GatewayError:
    try:
        return await ledger.reserve(request)
    except GatewayError as error:
        return error


def _shown(outcome: Reservation | GatewayError) -> Any:
    if isinstance(outcome, Reservation):
        return outcome.limit_statuses, outcome.over
    return outcome.kind, outcome.message, outcome.retry_after_s, outcome.headers


async def test_settled_statuses_are_exact_without_concurrent_requests(redis: RedisServer) -> None:
    clock = Clock()
    memory = MemoryLedger(clock, LEASE_US)
    shared = RedisLedger(RedisClient(redis.url, 5), OutagePolicy(), "test", lambda _: None, clock)
    limits = (Limit("tokens", "minute", 7000), Limit("inputs", "day", 100), Limit("requests", "in_flight", 2))
    request = QuotaRequest(
        secrets.token_hex(4), f"shown-{secrets.token_hex(4)}", limits, Cost(1, 700, 9), 60 * SECOND_US
    )
    shown = [ledger.settle(await ledger.reserve(request), Cost(1, 70, 4)) for ledger in (memory, shared)]
    await shared.aclose()

    assert shown[0] == shown[1]
    assert [6930, 96, 2] == [status.remaining for status in shown[1]]


def test_calendar_periods_agree_between_lua_and_python(redis: RedisServer) -> None:
    # Noon of every day, from before 1900 to after 2100, two centuries without a leap day.
    days = range(-26_000, 50_000)
    source = """
        local starts = {}
        for day = tonumber(ARGV[1]), tonumber(ARGV[2]) do
          local noon = day * DAY_US + DAY_US / 2
          for _, name in ipairs({'day', 'month'}) do
            for _, moment in ipairs({period({p = name}, noon)}) do starts[#starts + 1] = moment / DAY_US end
          end
        end
        return starts
    """
    with Redis(port=redis.port) as client:
        starts = client.eval(load_script("meters").source + source, 0, days[0], days[-1])
    expected = []
    for day in days:
        noon_us = day * DAY_US + DAY_US // 2
        for name in PERIODS:
            expected += [period_start_us(name, noon_us) // DAY_US, period_end_us(name, noon_us) // DAY_US]

    assert expected == starts


def operate(client: Redis, tenant: str, **operations: Any) -> Any:
    """Run the script with these operations on three limits, as no gateway would send them."""
    limits = [
        {"f": "rate", "a": 1000, "k": "rate", "w": 60 * SECOND_US},
        {"f": "day", "a": 1000, "k": "calendar", "p": "day"},
        {"f": "flight", "a": 5, "k": "flight"},
    ]
    times = {"now": START_US, "lease": LEASE_US, "ttl": 1000, "usage_ttl": 1000, "limits": limits}
    argument = msgspec.msgpack.encode(times | {"settles": [], "reserves": []} | operations)
    keys = [*keys_of(tenant), usage_key(tenant, "2024-02-29")]
    reply = client.eval(load_script("meters", "operate").source, len(keys), *keys, argument)
    return msgspec.msgpack.decode(reply)[1]


def test_scripts_take_no_negative_amount(redis: RedisServer) -> None:
    tenant = f"negative-{secrets.token_hex(4)}"

    def reserve(id_: str, cost: int) -> Any:
        amounts = [amount for index in (1, 2, 3) for amount in (index, cost, cost * 60_000, 0)]
        return [id_, 60 * SECOND_US, False, amounts]

    def settle(id_: str, cost: int, actual: int) -> Any:
        own = (cost, cost * 60_000, 0, actual, actual * 60_000, 0)
        amounts = [amount for index in (1, 2, 3) for amount in (index, *own)]
        return [id_, 0, 4, amounts, ["m|tokens", actual]]

    with Redis(port=redis.port) as client:
        used = operate(client, tenant, reserves=[reserve("a", 1)], settles=[])
        well = operate(client, tenant, settles=[settle("a", 1, 400)])
        operate(client, tenant, reserves=[reserve("b", -100_000)])
        reserved = operate(client, tenant, settles=[settle("b", -100_000, -100_000)])
        operate(client, tenant, reserves=[reserve("c", 0)])
        settled = operate(client, tenant, settles=[settle("c", 0, -100_000)])
        recorded = client.hgetall(usage_key(tenant, "2024-02-29"))

    assert [1, 1] == [used[1][0], used[2][0]]
    assert [24 * SECOND_US, 400, 0] == [state[0] for state in well]
    assert well == reserved == settled
    assert {b"m|tokens": b"400"} == recorded


units: st.SearchStrategy[Unit] = st.sampled_from([unit for unit in UNITS if unit != "budget"])
periods: st.SearchStrategy[Period] = st.sampled_from(("second", "minute", "hour", "day", "month"))
# The largest is that of a budget, in nano-units.
amounts = st.sampled_from((1, 3, 7, 60, 1000, 999_983, 2_000_000_000, BUDGET_MAX * NANO))
limits = st.one_of(
    st.builds(Limit, units, periods, amounts),
    st.builds(Limit, st.just("budget"), st.sampled_from(PERIODS), amounts),
    st.builds(Limit, st.just("requests"), st.just("in_flight"), st.integers(1, 4)),
)
costs = st.builds(
    Cost,
    st.integers(0, 3),
    st.integers(0, 1200),
    st.integers(0, 40),
    st.integers(0, 9),
    st.one_of(st.integers(0, 1200), st.integers(0, AMOUNT_MAX)),
    st.just("EUR"),
)
# More than are counted by name. One is the start of another one's name, and one a pattern of Redis.
USERS = ("ann", "ann lee", "*", "sha256:0f")
MOST_USERS = 2
user_limits = st.one_of(
    st.builds(Limit, units, periods, amounts), st.builds(Limit, st.just("budget"), st.just("day"), amounts)
)
steps = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from((1, 999, SECOND_US, 7 * SECOND_US, 61 * SECOND_US, LEASE_US))),
    st.tuples(
        st.just("reserve"), st.sampled_from(TENANTS), costs, st.booleans(), st.sampled_from((None, *USERS))
    ),
    st.tuples(st.just("forget"), st.sampled_from(TENANTS), st.sampled_from(USERS)),
    st.tuples(st.just("again"), st.integers(0, 50)),
    st.tuples(st.just("settle"), st.integers(0, 50), costs),
)


@settings(max_examples=120, deadline=None)
@given(
    tenant_limits=st.lists(limits, min_size=1, max_size=4, unique_by=lambda limit: limit.name),
    of_users=st.lists(user_limits, max_size=2, unique_by=lambda limit: limit.name),
    history=st.lists(steps, max_size=40),
)
def test_both_ledgers_agree_on_random_histories(
    redis: RedisServer, tenant_limits: list[Limit], of_users: list[Limit], history: list[tuple[Any, ...]]
) -> None:
    asyncio.run(play(redis, tuple(tenant_limits), of_users, history))


async def play(
    redis: RedisServer, limits: tuple[Limit, ...], of_users: list[Limit], history: list[tuple[Any, ...]]
) -> None:
    clock, events, events_in_memory = Clock(), list[Event](), list[Event]()
    client = RedisClient(redis.url, timeout_s=5)
    in_redis = RedisLedger(client, OutagePolicy(), "test", events.append, clock)
    both = Both(MemoryLedger(clock, LEASE_US, events_in_memory.append), in_redis, clock)
    # New tenants, so that histories do not affect each other.
    run = secrets.token_hex(4)
    try:
        for number, step in enumerate(history):
            await both.take_step(step, f"{run}{number}", run, limits, of_users)
        for tenant in TENANTS:
            await both.check_usage(f"{tenant}-{run}")
            await both.check_states(f"{tenant}-{run}", limits)
            # The number of end users' limits is bounded, too: those by name, and those of all others.
            known = await client.execute("ZCARD", user_limits_key(f"{tenant}-{run}"))
            assert known <= (MOST_USERS + 1) * len(of_users)
            fields = await client.execute("HKEYS", keys_of(f"{tenant}-{run}")[0])
            assert known == sum(each.startswith(b"end user ") for each in fields)
        await both.check_sums([f"{tenant}-{run}" for tenant in (*TENANTS, "none")])
    finally:
        await in_redis.aclose()
    assert all(isinstance(event, BudgetAlert) for event in events)
    assert events_in_memory == events


async def test_a_refund_after_forgetting_is_no_credit(redis: RedisServer) -> None:
    clock, user = Clock(), EndUser("ann", 2)
    shared = RedisLedger(RedisClient(redis.url, 5), OutagePolicy(), "test", lambda _: None, clock)
    tenant, limits = f"credit-{secrets.token_hex(4)}", (Limit("tokens", "month", 10).for_end_user("ann"),)

    def ask(tokens: int) -> QuotaRequest:
        id_ = secrets.token_hex(8)
        return QuotaRequest(id_, tenant, limits, Cost(1, tokens), 60 * SECOND_US, "m", end_user=user)

    for ledger in (MemoryLedger(clock, LEASE_US), shared):
        first = await ledger.reserve(ask(9))
        await ledger.forget_end_user(tenant, ("ann",))
        await ledger.reserve(ask(4))
        ledger.settle(first, NOTHING)
        await ledger.flush()
        assert [6] == [status.remaining for status in (await ledger.reserve(ask(0))).limit_statuses]
    await shared.aclose()
