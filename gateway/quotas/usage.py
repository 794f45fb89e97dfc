"""Recorded usage: rows by tenant, day and model, on request also by key, and the same as CSV."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec

from gateway.config.money import NANO, in_currency, money_text
from gateway.errors import InvalidInput
from gateway.quotas.limits import UNITS

# Characters with which a formula begins in Excel, LibreOffice and Google Sheets.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
DAYS_MAX = 400
USAGE_COLUMNS = ("tenant", "day", "model", "requests", "tokens", "inputs", "images", "cost")


class UsageRow(msgspec.Struct, frozen=True):
    """Settled usage of one model by one tenant on one day (UTC).

    cost: in the gateway's currency, by the price at the time of each call. key: id of the key that was used,
    empty for usage recorded without one; unset where keys are added up.
    """

    tenant: str
    day: str
    model: str
    requests: int = 0
    tokens: int = 0
    inputs: int = 0
    images: int = 0
    cost: float = 0.0
    key: str | msgspec.UnsetType = msgspec.UNSET


def usage_rows(
    tenant: str, day: str, counts: Mapping[tuple[str, str], Mapping[str, int]], *, by_key: bool
) -> list[UsageRow]:
    """Return the usage of a day, by model. counts: of each unit, by model and id of the key."""
    if by_key:
        return [_row(tenant, day, model, units, key) for (model, key), units in sorted(counts.items())]
    totals: dict[str, Counter[str]] = {}
    for (model, _), units in counts.items():
        totals.setdefault(model, Counter()).update(units)
    return [_row(tenant, day, model, units) for model, units in sorted(totals.items())]


def _row(
    tenant: str, day: str, model: str, units: Mapping[str, int], key: str | msgspec.UnsetType = msgspec.UNSET
) -> UsageRow:
    requests, tokens, inputs, images, cost = (units.get(unit, 0) for unit in UNITS)
    return UsageRow(tenant, day, model, requests, tokens, inputs, images, in_currency(cost), key)


def days_between(since: date | None, until: date | None) -> list[str]:
    """Return each day as YYYY-MM-DD, first and last included; the default is today, or the one day given.

    Raises: InvalidInput.
    """
    last = until or datetime.now(UTC).date()
    first = since or last
    if first > last:
        raise InvalidInput(f"since ({first}) is after until ({last})", param="since")
    count = (last - first).days + 1
    if count > DAYS_MAX:
        raise InvalidInput(f"from 1 to {DAYS_MAX} days, not {count}", param="since")
    return [(first + timedelta(days=number)).isoformat() for number in range(count)]


def columns_of(*, by_key: bool) -> tuple[str, ...]:
    """Return the columns of a table of usage."""
    return (*USAGE_COLUMNS, "key") if by_key else USAGE_COLUMNS


def cell(row: UsageRow, column: str) -> object:
    """Return the value of a row in a table. Money has no exponent there."""
    if column == "cost":
        return money_text(round(row.cost * NANO), "")
    return getattr(row, column)


def as_csv(rows: Sequence[UsageRow], *, by_key: bool = False) -> bytes:
    """Encode rows as CSV, with the column names in the first line. No cell is a formula for a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text)
    columns = columns_of(by_key=by_key)
    writer.writerow(columns)
    writer.writerows([_inert(cell(row, column)) for column in columns] for row in rows)
    return text.getvalue().encode()


def _inert(value: object) -> object:
    """Return a cell with a quote sign in front of a text that a spreadsheet would compute."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
