"""Recorded usage: rows by tenant, day and model, and the same as CSV."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec

from gateway.errors import InvalidInput

DAYS_MAX = 400
USAGE_COLUMNS = ("tenant", "day", "model", "requests", "tokens", "inputs", "images")


class UsageRow(msgspec.Struct, frozen=True):
    """Settled usage of one model by one tenant on one day (UTC)."""

    tenant: str
    day: str
    model: str
    requests: int = 0
    tokens: int = 0
    inputs: int = 0
    images: int = 0


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


def as_csv(rows: Sequence[UsageRow]) -> bytes:
    """Encode rows as CSV, with the column names in the first line."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(USAGE_COLUMNS)
    writer.writerows([getattr(row, column) for column in USAGE_COLUMNS] for row in rows)
    return text.getvalue().encode()
