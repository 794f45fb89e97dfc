"""Share of each budget that is spent. Pure."""

from collections.abc import Callable, Iterable, Iterator

from gateway.quotas.limits import Limit
from gateway.telemetry.budget_metrics import BudgetShare

# A tenant's name, and a limit of it or of one of its keys.
Budget = tuple[str, Limit]


def spent_shares(
    budgets: Iterable[Budget], spent_share: Callable[[str, Limit], float | None]
) -> Iterator[BudgetShare]:
    """Yield the spent share of each budget that has been used. spent_share: of the ledger."""
    for tenant, limit in budgets:
        share = spent_share(tenant, limit)
        if share is not None:
            yield BudgetShare(tenant, "key" if limit.scope else "tenant", share)
