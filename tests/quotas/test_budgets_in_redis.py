"""Budgets that several gateways share in one Redis: exact, alerted once, and counted through an outage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.config.money import NANO
from gateway.errors import QuotaExceeded
from gateway.events import BudgetAlert, Event
from gateway.quotas.ledger import NOTHING, QuotaRequest, remaining_budgets
from gateway.quotas.limits import SECOND_US, Limit, Price, parse_limit
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.store.redis_client import RedisClient
from tests.quotas.redis_server import RedisServer

PRICE = Price(130, "EUR")
TENANT = parse_limit("budget_per_month", 0.002)
KEYS = [parse_limit("budget_per_day", 0.0015, f"key {name} ") for name in ("a", "b")]
# 2026-11-24, 12:00 UTC.
NOW_US = 1_795_521_600 * SECOND_US
DAY = "2026-11-24"


@asynccontextmanager
async def gateways(
    server: RedisServer, events: list[Event], count: int = 4
) -> AsyncIterator[list[RedisLedger]]:
    """Yield the ledgers of several gateways."""
    ledgers = [
        RedisLedger(RedisClient(server.url, 5), OutagePolicy(), f"g{number}", events.append, lambda: NOW_US)
        for number in range(count)
    ]
    try:
        yield ledgers
    finally:
        for ledger in ledgers:
            await ledger.aclose()


def request(number: int, tokens: int, limits: tuple[Limit, ...], key: str = "") -> QuotaRequest:
    return QuotaRequest(str(number), "acme", limits, PRICE.cost(tokens, 1), 60 * SECOND_US, "m", key=key)


@pytest.mark.parametrize("used_percent", [100, 40])
async def test_four_gateways_spend_a_budget_exactly(own_redis: RedisServer, used_percent: int) -> None:
    events: list[Event] = []
    spent: dict[str, int] = {"a": 0, "b": 0}

    async def call(ledger: RedisLedger, number: int) -> None:
        name, tokens = "ab"[number % 2], 1 + number % 41
        limits = (TENANT, KEYS[number % 2])
        try:
            reservation = await ledger.reserve(request(number, tokens, limits, name))
        except QuotaExceeded:
            return
        await asyncio.sleep(0)
        # One of seven fails, and costs nothing.
        actual = NOTHING if number % 7 == 0 else PRICE.cost(tokens * used_percent // 100, 1)
        spent[name] += actual.budget
        ledger.settle(reservation, actual)

    async with gateways(own_redis, events) as ledgers:
        for start in range(0, 6400, 64):
            await asyncio.gather(*(call(ledgers[n % 4], n) for n in range(start, start + 64)))
        for ledger in ledgers:
            await ledger.flush()
        rows = await ledgers[0].usage("acme", [DAY], "key")
        shares = [ledger.spent_share("acme", TENANT) for ledger in ledgers]

    total = sum(spent.values())
    # All later calls were refused, down to the smallest one that is not settled at 0.
    smallest = PRICE.cost(1 if used_percent == 100 else 3).budget
    assert TENANT.amount - smallest < total <= TENANT.amount
    assert all(amount <= KEYS[0].amount for amount in spent.values())
    assert spent == {row.key: round(row.cost * NANO) for row in rows}
    assert max(share for share in shares if share is not None) == pytest.approx(
        total / TENANT.amount, abs=0.01
    )
    alerts = [event.budget for event in events if isinstance(event, BudgetAlert)]
    assert 1 == alerts.count("budget_per_month")
    assert len(alerts) == len(set(alerts))


async def test_what_is_left_is_that_of_all_gateways(own_redis: RedisServer) -> None:
    limits = (TENANT, parse_limit("tokens_per_day", 9), KEYS[0])
    async with gateways(own_redis, [], 2) as (one, other):
        one.settle(await one.reserve(request(0, 9_000, (TENANT, KEYS[0]))), PRICE.cost(9_000, 1))
        await one.flush()
        left = [await remaining_budgets(ledger, "acme", limits) for ledger in (other, other)]
        spent = await remaining_budgets(other, "acme", (parse_limit("tokens_per_day", 9),))
        own_redis.freeze()
        without = await remaining_budgets(other, "acme", limits)
        own_redis.thaw()

    assert 2 * [{"budget_per_month": 0.00083, "key a budget_per_day": 0.00033}] == left
    assert {} == spent == without


async def test_spending_during_an_outage_is_charged_afterwards(own_redis: RedisServer) -> None:
    ledger = RedisLedger(RedisClient(own_redis.url, 0.1), OutagePolicy(), "g", lambda _: None, lambda: NOW_US)
    limits = (TENANT,)
    await ledger.reserve(request(0, 1000, limits))
    own_redis.freeze()
    for number in range(1, 5):
        reservation = await ledger.reserve(request(number, 1000, limits))
        assert reservation.degraded
        ledger.settle(reservation, PRICE.cost(900, 1))
    with pytest.raises(QuotaExceeded) as refused:
        await ledger.reserve(request(5, 15_000, limits))
    own_redis.thaw()
    ledger._availability.record_success()
    await ledger._catch_up()
    await ledger.flush()
    [status] = (await ledger.reserve(request(6, 0, limits))).limit_statuses
    [row] = await ledger.usage("acme", [DAY])
    await ledger.aclose()

    assert "degraded" == refused.value.headers["x-quota-mode"]
    assert TENANT.amount - (1000 + 4 * 900) * PRICE.nano_per_token == status.remaining
    assert 4 * 900 * PRICE.nano_per_token == round(row.cost * NANO)
