"""Costs are never negative: what would be a credit is charged as nothing and logged as a bug."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission import Grant
from gateway.calls import Deadline
from gateway.quotas.ledger import LEASE_US, MemoryLedger, QuotaRequest
from gateway.quotas.limits import AMOUNT_MAX, FREE, Cost, Limit

LIMITS = (Limit("tokens", "minute", 1000), Limit("tokens", "day", 1000), Limit("inputs", "month", 50))


async def remaining_after(reserved: Cost, actual: Cost) -> list[int]:
    """Return what remains of each limit after a first request of 400 tokens and this second one."""
    ledger = MemoryLedger(lambda: 10**15)
    for id_, costs in (("first", (Cost(1, 400, 4),) * 2), ("second", (reserved, actual))):
        request = QuotaRequest(id_, "acme", LIMITS, costs[0], LEASE_US, "m")
        statuses = ledger.settle(await ledger.reserve(request), costs[1])
    [row] = await ledger.usage("acme", ["2001-09-09"])
    assert 400 <= row.tokens
    return [status.remaining for status in statuses]


@pytest.mark.parametrize(("reserved", "actual"), [(-100_000, 0), (0, -100_000), (-5, -5), (100, -(10**30))])
async def test_negative_cost_is_no_credit(
    reserved: int, actual: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert [600, 600, 46] == await remaining_after(Cost(1, reserved), Cost(1, actual))
    assert "bug: a cost of" in caplog.text


def test_absurd_cost_is_the_highest_valid_one(caplog: pytest.LogCaptureFixture) -> None:
    assert AMOUNT_MAX == Cost(tokens=10**30).tokens
    assert "bug: a cost of" in caplog.text


async def test_grant_charges_no_negative_count(caplog: pytest.LogCaptureFixture) -> None:
    ledger = MemoryLedger(lambda: 10**15)
    request = QuotaRequest("id", "acme", LIMITS, Cost(1, 400, 4), LEASE_US, "m")
    reservation = await ledger.reserve(request)
    deadline = Deadline(time.monotonic() + 60, timeout_s=60)
    prepared: Any = SimpleNamespace(route=SimpleNamespace(price=FREE))
    async with Grant(None, prepared, deadline, reservation, ledger) as grant:  # type: ignore[arg-type] - not used
        grant.count(300)
        grant.count(-100_000)
        grant.count_unanswered(-100_000)
    assert [700, 700, 46] == [status.remaining for status in grant.limit_statuses]
    assert "bug: a cost of -100000 tokens" in caplog.text
