"""Budgets in the ledger: never exceeded, one alert a period, and refusals that name owner and renewal."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.money import NANO
from gateway.errors import QuotaExceeded, RequestExceedsLimit
from gateway.events import BudgetAlert, Event
from gateway.quotas.ledger import NOTHING, MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import SECOND_US, Limit, Price, parse_limit

# 2026-11-24, 12:00 UTC.
START_US = 1_795_521_600 * SECOND_US
DAY_S = 24 * 3600
# 0.02 EUR for a million tokens.
PRICE = Price(20, "EUR")


class Clock:
    """Wall clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    def move(self, seconds: int) -> None:
        """Advance the clock."""
        self.now_us += seconds * SECOND_US


class Tenant:
    """Tenant with budgets in a ledger of its own."""

    def __init__(self, *limits: Limit) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.ledger = MemoryLedger(self.clock, observe=self.events.append)
        self.limits = limits
        self._number = 0

    async def reserve(self, tokens: int, price: Price = PRICE, **options: Any) -> Reservation:
        """Reserve the cost of a call with as many tokens."""
        self._number += 1
        request = QuotaRequest(
            str(self._number),
            "acme",
            self.limits,
            price.cost(tokens, 1),
            600 * SECOND_US,
            options.pop("model", "m"),
            **options,
        )
        return await self.ledger.reserve(request)

    async def spend(self, tokens: int, price: Price = PRICE, **options: Any) -> None:
        """Reserve and settle a call."""
        self.ledger.settle(await self.reserve(tokens, price, **options), price.cost(tokens, 1))


def budget(amount: float, period: str = "month", scope: str = "") -> Limit:
    return parse_limit(f"budget_per_{period}", amount, scope)


async def test_refusal_names_owner_amount_spent_and_renewal() -> None:
    tenant = Tenant(budget(100), budget(0.5, scope="key ci "))
    await tenant.spend(24_000_000)
    with pytest.raises(QuotaExceeded) as refused:
        await tenant.reserve(2_000_000, is_bound=True)

    assert refused.value.message == (
        "limit key ci budget_per_month (0.50 EUR), the budget of key ci: 0.48 EUR is spent or reserved, "
        "0.02 EUR is left, and this call may cost up to 0.04 EUR, by its length; it starts again on "
        "2026-12-01 (UTC), try again in 156h0m0s"
    )
    assert (True, "budget") == (refused.value.calendar, refused.value.unit)
    # The headers show the budget with the smallest share left, in the currency.
    assert ("0.50", "0.02") == tuple(
        refused.value.headers[f"x-ratelimit-{field}-budget"] for field in ("limit", "remaining")
    )


async def test_refusal_names_the_tenant() -> None:
    tenant = Tenant(budget(0.01, "day"), budget(1, scope="key ci "))
    await tenant.spend(500_000)
    with pytest.raises(QuotaExceeded, match=r"limit budget_per_day \(0.01 EUR\), the budget of tenant acme"):
        await tenant.reserve(1)


async def test_a_call_above_the_whole_budget_can_never_pass() -> None:
    tenant = Tenant(budget(0.01))
    with pytest.raises(
        RequestExceedsLimit, match=r"costs 0.02 EUR, and budget_per_month is 0.01 EUR: it can"
    ):
        await tenant.reserve(1_000_000)


async def test_a_budget_is_renewed_with_its_month() -> None:
    tenant = Tenant(budget(0.01))
    await tenant.spend(500_000)
    tenant.clock.move(156 * 3600 - 1)
    with pytest.raises(QuotaExceeded):
        await tenant.reserve(1)
    tenant.clock.move(1)
    await tenant.spend(500_000)


async def test_calls_without_a_price_spend_nothing() -> None:
    tenant = Tenant(budget(0.01))
    await tenant.spend(500_000)
    await tenant.spend(10**9, Price())

    [row] = await tenant.ledger.usage("acme", ["2026-11-24"])
    assert (0.01, 10**9 + 500_000) == (row.cost, row.tokens)


async def test_one_alert_in_a_period() -> None:
    tenant = Tenant(budget(1), budget(0.1, "day", "key ci "))
    await tenant.spend(3_999_999)
    assert [] == tenant.events
    # A reservation is no expense yet.
    held = await tenant.reserve(1_000_000)
    assert [] == tenant.events
    tenant.ledger.settle(held, NOTHING)
    assert [] == tenant.events
    await tenant.spend(1)
    await tenant.spend(1)
    assert [BudgetAlert("acme", "key ci budget_per_day", 0.08, 0.1)] == tenant.events
    # The next day is over before the month.
    tenant.clock.move(DAY_S)
    await tenant.spend(4_000_000)
    assert 2 == len(tenant.events)


async def test_a_late_settlement_alerts_no_later_period() -> None:
    tenant = Tenant(budget(0.1, "day"))
    late = await tenant.reserve(5_000_000)
    tenant.clock.move(DAY_S)
    tenant.ledger.settle(late, PRICE.cost(5_000_000))

    assert [] == tenant.events


async def test_spent_share_follows_the_period() -> None:
    month, unused = budget(1), budget(2, scope="key ci ")
    tenant = Tenant(month)
    await tenant.spend(45_000_000)

    assert [0.9, None, None] == [
        tenant.ledger.spent_share(name, limit)
        for name, limit in (("acme", month), ("acme", unused), ("other", month))
    ]
    tenant.clock.move(31 * DAY_S)
    assert 0 == tenant.ledger.spent_share("acme", month)


@given(
    amount=st.integers(1, 2_000),
    calls=st.lists(
        st.tuples(
            st.integers(0, 900),  # tokens that are reserved
            st.integers(0, 100),  # per cent of them that are used
            st.sampled_from((1, 7, 20)),  # nano-units for a token, which a reload may change
            st.sampled_from(("now", "later", "refund", "never")),
        ),
        max_size=40,
    ),
)
def test_no_history_exceeds_a_budget(amount: int, calls: list[tuple[int, int, int, str]]) -> None:
    asyncio.run(_play(amount, calls))


async def _play(amount: int, calls: list[tuple[int, int, int, str]]) -> None:
    tenant = Tenant(budget(amount / NANO))
    spent, open_cost = 0, 0
    held = []
    for reserved, used, nano_per_token, end in calls:
        price, tokens = Price(nano_per_token, "EUR"), reserved * used // 100
        cost = price.cost(reserved, 1).budget
        try:
            reservation = await tenant.reserve(reserved, price)
        except (QuotaExceeded, RequestExceedsLimit):
            assert spent + open_cost + cost > amount
            continue
        assert spent + open_cost + cost <= amount
        actual = NOTHING if end == "refund" else price.cost(tokens, 1)
        if end in {"later", "never"}:
            held += [(reservation, actual)] if end == "later" else []
            open_cost += cost
        else:
            tenant.ledger.settle(reservation, actual)
            spent += actual.budget
    for reservation, actual in held:
        tenant.ledger.settle(reservation, actual)
        spent += actual.budget
    assert spent <= amount
    rows = await tenant.ledger.usage("acme", ["2026-11-24"])
    assert spent == round(sum(row.cost for row in rows) * NANO)
