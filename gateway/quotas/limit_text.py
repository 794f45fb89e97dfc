"""Limits and costs in the words of a refusal. Pure."""

from typing import Literal

import msgspec

from gateway.config.money import money_text
from gateway.quotas.limits import Limit

# Whether a cost is the least or the most that a call can have; None if it was counted.
Bound = Literal["lower", "upper"] | None


class LimitText(msgspec.Struct, frozen=True):
    """Words for one limit. tenant: that it limits. currency: of a budget."""

    limit: Limit
    tenant: str
    currency: str

    @property
    def name(self) -> str:
        """Name and amount, and of a budget the owner."""
        owner = self.limit.scope.rstrip() or f"tenant {self.tenant}"
        name = f"{self.limit.name} ({self.amount})"
        return f"{name}, the budget of {owner}" if self.limit.unit == "budget" else name

    @property
    def amount(self) -> str:
        """Amount of the whole limit."""
        return self._text(self.limit.amount)

    def cost(self, amount: int, bound: Bound) -> str:
        """Describe a cost in the limit's unit, and whether it was counted."""
        unit = self.limit.unit
        text = self._text(amount)
        if unit != "budget":
            text += f" {unit.removesuffix('s') if amount == 1 else unit}"
        if unit != "requests" and bound == "lower":
            return f"costs at least {text}"
        if unit in {"tokens", "budget"} and bound == "upper":
            return f"may cost up to {text}, by its length"
        return f"costs {text}"

    def remaining(self, amount: int) -> str:
        """Describe the remaining amount, as the beginning of a sentence."""
        if self.limit.unit == "budget":
            spent, left = self._text(self.limit.amount - amount), self._text(amount)
            return f"{spent} is spent or reserved, {left} is left, and "
        match amount:
            case 0:
                return "nothing is left, and "
            case 1:
                return "1 is left, and "
        return f"{amount} are left, and "

    def _text(self, amount: int) -> str:
        return money_text(amount, self.currency) if self.limit.unit == "budget" else str(amount)
