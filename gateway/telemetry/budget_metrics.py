"""Gauge of the spent share of budgets."""

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from gateway.telemetry.metric_factory import MetricFactory

# tenant: of all keys of a tenant. key: of one key.
BudgetOwner = Literal["tenant", "key"]


class BudgetShare(msgspec.Struct, frozen=True):
    """Share of one budget that is spent, reservations included."""

    tenant: str
    owner: BudgetOwner
    share: float


ReadBudgets = Callable[[], Iterable[BudgetShare]]


class BudgetMetrics:
    """Largest spent share of each tenant's budgets.

    removes_series: those of removed budgets are deleted. Files of several workers keep them, set to 0.
    """

    def __init__(self, create: MetricFactory, *, removes_series: bool) -> None:
        self._removes_series = removes_series
        self._shown: set[tuple[str, str]] = set()
        self._spent = create.gauge(
            "budget_spent_ratio",
            "Largest spent share of the budgets of a tenant, or of its keys.",
            ("tenant", "owner"),
            "livemax",
        )

    def refresh(self, read: ReadBudgets) -> None:
        """Read the budgets into the gauge."""
        shares: dict[tuple[str, str], float] = {}
        for budget in read():
            key = (budget.tenant, budget.owner)
            shares[key] = max(shares.get(key, 0.0), budget.share)
        for labels, share in shares.items():
            self._spent.labels(*labels).set(share)
        for removed in self._shown - shares.keys():
            self._spent.labels(*removed).set(0)
            if self._removes_series:
                self._spent.remove(*removed)
        self._shown = set(shares)
