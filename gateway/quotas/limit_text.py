"""Limits and costs in the words of a refusal, and in OpenAI's rate-limit headers. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.config.money import money_text
from gateway.quotas.limits import SECOND_US, UNITS, Limit, LimitStatus, Unit

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


# Units whose headers are sent whenever one limit applies: Weaviate's clients send one text a request until a
# reply has both.
ALWAYS_SHOWN: tuple[Unit, ...] = ("requests", "tokens")
# Shown as the limit of a unit without one, and as what remains of it. It fits into 32 bits.
UNLIMITED = 1_000_000_000
NAMES = {
    unit: tuple(f"x-ratelimit-{field}-{unit}" for field in ("limit", "remaining", "reset")) for unit in UNITS
}


def rate_limit_headers(
    limit_statuses: Sequence[LimitStatus], *, show_unlimited: bool = False
) -> dict[str, str]:
    """Build OpenAI's x-ratelimit-* headers: per unit, of the limit with the smallest remaining share.

    If a limit applies, requests and tokens have headers even without a limit of their own, with `UNLIMITED`.
    show_unlimited: they have them if no limit applies, too.
    """
    if not limit_statuses and not show_unlimited:
        return {}
    tightest: dict[Unit, tuple[float, LimitStatus]] = {}
    for status in limit_statuses:
        unit, share = status.limit.unit, status.remaining / max(1, status.limit.amount)
        if unit not in tightest or share < tightest[unit][0]:
            tightest[unit] = share, status
    headers: dict[str, str] = {}
    for unit in ALWAYS_SHOWN:
        if unit not in tightest:
            headers |= zip(NAMES[unit], (str(UNLIMITED), str(UNLIMITED), format_duration(0)), strict=True)
    for unit, (_, status) in tightest.items():
        limit, remaining, reset = NAMES[unit]
        headers[limit] = _amount_text(status.limit, status.limit.amount)
        headers[remaining] = _amount_text(status.limit, status.remaining)
        # When a place in flight becomes free is unknown: show a second, not the expiry of its lease.
        in_flight = status.limit.period == "in_flight"
        headers[reset] = format_duration(min(status.reset_us, SECOND_US) if in_flight else status.reset_us)
    return headers


def _amount_text(limit: Limit, amount: int) -> str:
    return money_text(amount, "") if limit.unit == "budget" else str(amount)


def format_duration(microseconds: int) -> str:
    """Format as OpenAI does: 1h2m3s, 6m0s, 1.25s, 20ms; rounded up to the millisecond."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms // 1000}s" if rest_ms % 1000 == 0 else f"{rest_ms / 1000:g}s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes or hours else "") + seconds
