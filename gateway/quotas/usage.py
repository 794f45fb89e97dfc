"""Recorded usage: rows by tenant, day and model, by key or by end user, totals of a month, and all as CSV.

Rule for money in tables and CSV: added up in whole nano-units, then rounded to six decimal places, of which
at least two are shown. JSON has each amount as it is counted.
"""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal, TypeAlias

import msgspec

from gateway.config.money import NANO, in_currency, rounded_money
from gateway.errors import InvalidInput
from gateway.quotas.limits import UNITS

# Characters with which a formula begins in Excel, LibreOffice and Google Sheets.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
DAYS_MAX = 400
# Complete days whose mean is the forecast of the rest of the month: each day of the week once.
FORECAST_DAYS = 7
DAY_S = 24 * 3600
MONTH = re.compile(r"\d{4}-\d{2}", re.ASCII)
COUNT_COLUMNS = ("requests", "tokens", "inputs", "images", "cost")
# What has a row of its own.
UsageBy: TypeAlias = Literal["model", "key", "end_user"]


class UsageRow(msgspec.Struct, frozen=True):
    """Settled usage of one model by one tenant on one day (UTC).

    cost: in the gateway's currency, by the price at the time of each call. key: id of the key that was used,
    empty for usage recorded without one; unset where keys are added up. end_user: name under which an end
    user is counted, `other` for all that were too many or are forgotten; unset in the same way.
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
    end_user: str | msgspec.UnsetType = msgspec.UNSET


class UsageSum(msgspec.Struct, frozen=True):
    """Settled usage, added up over models and keys. budget: in nano-units of the currency."""

    requests: int = 0
    tokens: int = 0
    budget: int = 0

    @classmethod
    def of(cls, counts: Iterable[Mapping[str, int]]) -> "UsageSum":
        """Return the sum of counts in each unit."""
        requests = tokens = budget = 0
        for units in counts:
            requests += units.get("requests", 0)
            tokens += units.get("tokens", 0)
            budget += units.get("budget", 0)
        return cls(requests, tokens, budget)

    def plus(self, other: "UsageSum") -> "UsageSum":
        """Return the sum of two."""
        return UsageSum(
            self.requests + other.requests, self.tokens + other.tokens, self.budget + other.budget
        )


NO_USAGE = UsageSum()


class TenantUsage(msgspec.Struct, frozen=True):
    """Settled usage of a tenant on some days. latest: of the first of them, today. total: of all."""

    latest: UsageSum = NO_USAGE
    total: UsageSum = NO_USAGE


class Forecast(msgspec.Struct, frozen=True):
    """Expected usage of the whole month: what was used, and for the rest the mean of the last seven days."""

    requests: int
    tokens: int
    inputs: int
    images: int
    cost: float


class UsageTotal(msgspec.Struct, frozen=True):
    """Settled usage of a month.

    tenant: None for all tenants together. forecast: of the current month; None for another one, and before
    there is a complete day of usage.
    """

    tenant: str | None
    requests: int
    tokens: int
    inputs: int
    images: int
    cost: float
    forecast: Forecast | None = None


class MonthUsage(msgspec.Struct, frozen=True):
    """Usage of a month (UTC): by tenant and model, by tenant, and of all.

    month: YYYY-MM, which the rows of `data` have as their day. currency: of the costs.
    """

    month: str
    data: list[UsageRow]
    tenants: list[UsageTotal]
    total: UsageTotal
    currency: str | None = None


def usage_rows(
    tenant: str, day: str, counts: Mapping[tuple[str, str], Mapping[str, int]], by: UsageBy = "model"
) -> list[UsageRow]:
    """Return the usage of a day, by model.

    counts: of each unit, by model and id of the key, or by model and end user.
    """
    if by != "model":
        return [
            _row(tenant, day, model, units, {by: name}) for (model, name), units in sorted(counts.items())
        ]
    totals: dict[str, Counter[str]] = {}
    for (model, _), units in counts.items():
        totals.setdefault(model, Counter()).update(units)
    return [_row(tenant, day, model, units) for model, units in sorted(totals.items())]


def _row(
    tenant: str, day: str, model: str, units: Mapping[str, int], names: Mapping[str, str] | None = None
) -> UsageRow:
    row = UsageRow(tenant, day, model, *_amounts(units))
    return row if not names else msgspec.structs.replace(row, **names)


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


def first_of_month(month: str) -> date:
    """Return the first day of a month, which has begun. Raises: InvalidInput."""
    try:
        first = date.fromisoformat(f"{month}-01") if MONTH.fullmatch(month) else None
    except ValueError:
        first = None
    if first is None:
        raise InvalidInput(f"{month!r} is no month such as 2027-01", param="month")
    if first > datetime.now(UTC).date():
        raise InvalidInput(f"{month} has not begun", param="month")
    return first


def days_of_month(first: date, now: datetime) -> list[str]:
    """Return the days whose usage `month_usage` needs: those of the month, and those of its forecast."""
    today = now.date()
    last = min(today, _next_month(first) - timedelta(days=1))
    start = min(first, today - timedelta(days=FORECAST_DAYS)) if last == today else first
    return [(start + timedelta(days=number)).isoformat() for number in range((last - start).days + 1)]


def month_usage(
    first: date, now: datetime, rows: Iterable[UsageRow], currency: str | None = None
) -> MonthUsage:
    """Return the usage of a month. rows: of `days_of_month`, of all tenants. now: in UTC."""
    month = f"{first:%Y-%m}"
    merged: defaultdict[tuple[str, str, tuple[tuple[str, str], ...]], Counter[str]] = defaultdict(Counter)
    days: defaultdict[str | None, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        units = _units_of(row)
        days[row.tenant][row.day].update(units)
        days[None][row.day].update(units)
        if row.day.startswith(month):
            names = ((name, getattr(row, name)) for name in ("key", "end_user"))
            stated = tuple((name, value) for name, value in names if value is not msgspec.UNSET)
            merged[row.tenant, row.model, stated].update(units)
    data = [
        _row(tenant, month, model, units, dict(names))
        for (tenant, model, names), units in sorted(merged.items(), key=lambda item: item[0])
    ]
    tenants = sorted({row.tenant for row in data})
    totals = [_total(tenant, days[tenant], first, now) for tenant in tenants]
    return MonthUsage(month, data, totals, _total(None, days[None], first, now), currency)


def _next_month(first: date) -> date:
    return (first + timedelta(days=32)).replace(day=1)


def _units_of(row: UsageRow) -> dict[str, int]:
    """Return the counts of a row, money in nano-units."""
    counts = (row.requests, row.tokens, row.inputs, row.images, round(row.cost * NANO))
    return dict(zip(UNITS, counts, strict=True))


def _total(
    tenant: str | None, days: Mapping[str, Mapping[str, int]], first: date, now: datetime
) -> UsageTotal:
    """Return the total of a month. days: usage by day, also of days before the month."""
    used: Counter[str] = Counter()
    for day, units in days.items():
        if day.startswith(f"{first:%Y-%m}"):
            used.update(units)
    forecast = _forecast(used, days, first, now)
    return UsageTotal(tenant, *_amounts(used), None if forecast is None else Forecast(*_amounts(forecast)))


def _forecast(
    used: Mapping[str, int], days: Mapping[str, Mapping[str, int]], first: date, now: datetime
) -> Counter[str] | None:
    """Return the expected usage of a month, None for a past one and without a complete day."""
    ends, today = datetime.combine(_next_month(first), time(), UTC), now.date()
    recent = [today - timedelta(days=number) for number in range(1, FORECAST_DAYS + 1)]
    known = [day for day in recent if day.isoformat() in days]
    if now >= ends or not known:
        return None
    # A tenant that is newer than a week has had fewer days.
    rate: Counter[str] = Counter()
    for day in known:
        rate.update(days[day.isoformat()])
    share = (ends - now).total_seconds() / DAY_S / (today - known[-1]).days
    return Counter({unit: used.get(unit, 0) + round(rate[unit] * share) for unit in UNITS})


def _amounts(units: Mapping[str, int]) -> tuple[int, int, int, int, float]:
    """Return counts in the order of the columns, money in the currency."""
    requests, tokens, inputs, images, cost = (units.get(unit, 0) for unit in UNITS)
    return requests, tokens, inputs, images, in_currency(cost)


def columns_of(by: UsageBy = "model") -> tuple[str, ...]:
    """Return the columns of a table of usage."""
    own = () if by == "model" else (by,)
    return ("tenant", "day", "model", *COUNT_COLUMNS, *own)


def cells(row: UsageRow | UsageTotal | Forecast, columns: Sequence[str]) -> list[object]:
    """Return the values of these columns; those that a row lacks are empty. Money has no exponent."""
    return [_cell(getattr(row, column, ""), column) for column in columns]


def _cell(value: object, column: str) -> object:
    if column == "cost" and isinstance(value, float):
        return rounded_money(round(value * NANO))
    return "" if value is None or value is msgspec.UNSET else value


def as_csv(rows: Sequence[UsageRow], currency: str | None = None, by: UsageBy = "model") -> bytes:
    """Encode rows as CSV, with the column names in the first line."""
    columns = columns_of(by)
    return _csv((*columns, "currency"), [[*cells(row, columns), currency or ""] for row in rows])


def month_table(usage: MonthUsage, by: UsageBy = "model") -> tuple[list[str], list[list[object]]]:
    """Return the columns and the rows of a month.

    The rows of tenants and of all have their name in the column `total`, so that nothing is added up twice.
    """
    columns = columns_of(by)
    rows: list[list[object]] = [["", *cells(row, columns), ""] for row in usage.data]
    for total in (*usage.tenants, usage.total):
        kind, forecast = "all" if total.tenant is None else "tenant", total.forecast
        cost = [""] if forecast is None else cells(forecast, ("cost",))
        rows.append([kind, *cells(total, columns), *cost])
        rows[-1][columns.index("day") + 1] = usage.month
    return ["total", *("month" if column == "day" else column for column in columns), "forecast_cost"], rows


def month_csv(usage: MonthUsage, by: UsageBy = "model") -> bytes:
    """Encode a month as CSV, with the column names in the first line."""
    columns, rows = month_table(usage, by)
    return _csv((*columns, "currency"), [[*row, usage.currency or ""] for row in rows])


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Encode a table as CSV. No cell is a formula for a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_inert(value) for value in row] for row in rows)
    return text.getvalue().encode()


def _inert(value: object) -> object:
    """Return a cell with a quote sign in front of a text that a spreadsheet would compute."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
