"""Remaining budgets of one caller, as its ledger counts them."""

import secrets
from collections.abc import Iterable

from gateway.config.money import in_currency
from gateway.quotas.ledger import LEASE_US, NOTHING, Ledger, QuotaRequest
from gateway.quotas.limits import Limit


async def remaining_budgets(ledger: Ledger, tenant: str, limits: Iterable[Limit]) -> dict[str, float]:
    """Return what is left of each budget among limits, by its name; nothing while the store is away.

    A reservation of nothing reads them: they are those that the next call would meet. Without a budget there
    is no trip to the store. Raises: QuotaUnavailable.
    """
    budgets = tuple(dict.fromkeys(limit for limit in limits if limit.unit == "budget"))
    if not budgets:
        return {}
    request = QuotaRequest(secrets.token_hex(8), tenant, budgets, NOTHING, LEASE_US, shadow=True)
    reservation = await ledger.reserve(request)
    ledger.settle(reservation, NOTHING)
    if reservation.degraded:
        # These are shares of one gateway.
        return {}
    return {status.limit.name: in_currency(status.remaining) for status in reservation.limit_statuses}
