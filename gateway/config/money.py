"""Amounts of money as whole nano-units, a billionth of the currency. Pure.

The file and the API write amounts as decimals, which arrive as floats. Every decimal with at most nine places
up to BUDGET_MAX has its own float, and that float's shortest text is the decimal. Nothing is rounded.
"""

from decimal import Decimal

NANO = 10**9
TOKENS_OF_PRICE = 10**6
# Ledgers count in doubles, which are whole numbers up to 2^53. A budget and one more call stay below that.
BUDGET_MAX = 4_000_000
# With it, 32 Mi tokens, as many as the largest body has bytes, cost a fraction of the largest budget.
PRICE_MAX = 10_000


def is_budget(limit: str) -> bool:
    """Return whether the limit of this name counts money."""
    return limit.startswith("budget_")


def budget_of(amount: float) -> int:
    """Return a budget in nano-units. Raises: ValueError with the problem."""
    if not 0 < amount <= BUDGET_MAX:
        raise ValueError(f"expected an amount above 0, at most {BUDGET_MAX}")
    return _exact(amount, NANO, "nine decimal places")


def token_price(per_million: float) -> int:
    """Return the price of one token in nano-units. Raises: ValueError with the problem."""
    if not 0 <= per_million <= PRICE_MAX:
        raise ValueError(f"expected a price from 0 to {PRICE_MAX}")
    return _exact(per_million, NANO // TOKENS_OF_PRICE, "three decimal places")


def in_currency(nano_units: int) -> float:
    """Return an amount in the currency, exact to the last nano-unit up to BUDGET_MAX."""
    return nano_units / NANO


def money_text(nano_units: int, currency: str) -> str:
    """Format an amount with at least two decimal places: 12.50 EUR."""
    whole, rest = divmod(nano_units, NANO)
    return f"{whole}.{f'{rest:09}'.rstrip('0'):0<2} {currency}".rstrip()


def rounded_money(nano_units: int) -> str:
    """Format an amount for a table: rounded to six decimal places, of which at least two are shown."""
    return money_text(round(nano_units, -3), "")


def _exact(amount: float, scale: int, places: str) -> int:
    # The shortest text of a float is the decimal that was written.
    units = Decimal(repr(amount)) * scale
    if units != units.to_integral_value():
        raise ValueError(f"expected at most {places}")
    return int(units)
