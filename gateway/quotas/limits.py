"""Arithmetic of limits, and the price of a call. Pure: time is an argument in integer microseconds.

Guarantees. Per second, minute and hour, at most amount + amount × t ÷ window is admitted in any span of
length t. Per day and month (UTC), never more than the amount. `requests_in_flight`: never more at once.
Budgets are counted in whole nano-units of the currency (`config/money.py`).

A rate limit is a generic cell rate algorithm (GCRA). Its state is the theoretical arrival time (TAT), the
moment at which the bucket will be full again. A reservation moves the TAT forward by its cost in time. A
correction must move it back to where it would be if the true cost had been charged from the start. A
plain subtraction would credit idle time again. The bucket therefore keeps one candidate TAT for each span
between open reservations: the TAT of a bucket that was full at the start of that span. The true TAT is the
maximum of the candidates, and a correction moves only the candidates from before the corrected reservation.
"""

import logging
from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

import msgspec

from gateway.config.money import budget_of, in_currency, is_budget

logger = logging.getLogger("gateway")

Unit = Literal["requests", "tokens", "inputs", "images", "budget"]
Period = Literal["second", "minute", "hour", "day", "month", "in_flight"]

# The scripts compute with doubles, which are whole numbers up to here.
AMOUNT_MAX = 2**52

# End users beyond the number that is counted one by one.
OTHER_USERS = "other"
# Prefix of limits that count only lines of jobs.
BATCH = "batch_"


UNITS: tuple[Unit, ...] = ("requests", "tokens", "inputs", "images", "budget")
# Used share of a budget from which operators are alerted.
ALERT_PERCENT = 80
SECOND_US = 1_000_000
WINDOWS_US: dict[Period, int] = {
    "second": SECOND_US,
    "minute": 60 * SECOND_US,
    "hour": 3600 * SECOND_US,
}


class Limit(msgspec.Struct, frozen=True, cache_hash=True):
    """Limit of `amount` units per period.

    scope: prefix of the name unless the limit is the whole tenant's: "key <id> ", "model <name> ", "batch_",
    "end user <name> ". is_end_users: it is one of many, of which a ledger keeps a bounded number.
    """

    unit: Unit
    period: Period
    amount: int
    scope: str = ""
    is_end_users: bool = False

    @property
    def name(self) -> str:
        """Name as in router.yaml, after the scope."""
        period = "in_flight" if self.period == "in_flight" else f"per_{self.period}"
        return f"{self.scope}{self.unit}_{period}"

    def for_end_user(self, name: str) -> "Limit":
        """Return the same limit for one end user."""
        return Limit(self.unit, self.period, self.amount, end_user_scope(name), is_end_users=True)

    @property
    def for_other_users(self) -> "Limit":
        """The same limit for all end users together that are too many to be counted one by one."""
        return self.for_end_user(OTHER_USERS)

    @property
    def shown_amount(self) -> float:
        """Amount as in router.yaml: that of a budget in the currency."""
        return in_currency(self.amount) if self.unit == "budget" else self.amount

    @property
    def alert_at(self) -> int | None:
        """Used amount from which an alert is due, None for a limit without alerts."""
        if self.unit != "budget" or self.period not in {"day", "month"} or self.is_end_users:
            return None
        return -(-self.amount * ALERT_PERCENT // 100)


class Cost(msgspec.Struct, frozen=True):
    """Cost of a request in each unit: never negative, because that would be a credit.

    images: pictures, of which an input may have several. budget: nano-units of the currency, whose
    name is for messages.
    """

    requests: int = 1
    tokens: int = 0
    inputs: int = 0
    images: int = 0
    budget: int = 0
    currency: str = ""

    def __post_init__(self) -> None:
        """Replace an amount that no request can have."""
        counts_fit = 0 <= self.inputs <= AMOUNT_MAX and 0 <= self.images <= AMOUNT_MAX
        work_fits = 0 <= self.tokens <= AMOUNT_MAX and 0 <= self.budget <= AMOUNT_MAX
        if work_fits and counts_fit and self.requests >= 0:
            return
        for unit in UNITS:
            msgspec.structs.force_setattr(self, unit, bounded_amount(self.of(unit), unit))

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of both."""
        sums = {unit: self.of(unit) + other.of(unit) for unit in UNITS}
        return Cost(**sums, currency=self.currency or other.currency)

    def of(self, unit: Unit) -> int:
        """Return the amount of one unit."""
        amount: int = getattr(self, unit)
        return amount


def bounded_amount(amount: int, unit: Unit) -> int:
    """Return the amount, or the nearest one that is valid; an invalid one is logged as a bug."""
    if 0 <= amount <= AMOUNT_MAX:
        return amount
    bounded = 0 if amount < 0 else AMOUNT_MAX
    logger.error("bug: a cost of %d %s is invalid; %d is charged", amount, unit, bounded, stack_info=True)
    return bounded


class LimitStatus(msgspec.Struct, frozen=True):
    """State of a limit: the remaining amount, and the microseconds until all of it is available again."""

    limit: Limit
    remaining: int
    reset_us: int


def end_user_scope(name: str) -> str:
    """Return the prefix for the names of an end user's limits."""
    return f"end user {name} "


def parse_limit(name: str, amount: float, scope: str = "") -> Limit:
    """Parse a limit's name and amount in router.yaml, which the config has validated."""
    counted = budget_of(amount) if is_budget(name) else int(amount)
    if name == "requests_in_flight":
        return Limit("requests", "in_flight", counted, scope)
    if is_batch_limit(name):
        # The arithmetic is that of tokens; only lines of jobs are counted.
        name, scope = name.removeprefix(BATCH), scope + BATCH
    unit, _, period = name.partition("_per_")
    return msgspec.convert({"unit": unit, "period": period, "amount": counted, "scope": scope}, Limit)


def is_batch_limit(name: str) -> bool:
    """Return whether a limit of this name in router.yaml counts only lines of jobs."""
    return name.startswith(BATCH)


class RateMeter:
    """GCRA with exact corrections, for limits per second, minute and hour.

    Time is counted in ticks, microseconds × the limit's amount. Every cost is then a whole number of
    ticks, and a limit that does not divide its window is as exact as one that does.

    A candidate can be dropped once no correction can make it the latest again. The lead of the earlier of
    two neighbours changes only by corrections of the reservations that are open between them. Each
    correction takes at most the reserved amount from the lead (a request that used more adds to it), and
    closes its reservation. Therefore a later candidate that trails by at least the sum of those reserves
    trails for ever. If no reservation is open between the two, the lead is fixed, and the one behind is
    dropped, whichever it is. Comparing neighbours is enough: a candidate that trails an earlier one by that
    much trails the candidate between them even more, because that one itself does not trail so far.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._window_us = WINDOWS_US[limit.period]
        # Per candidate: the number of the first reservation after it, and its TAT minus `_moved`.
        self._firsts: list[int] = []
        self._tats: list[int] = []
        self._moved = 0
        self._latest = 0
        # Per open reservation: its number and its reserved cost, in ticks.
        self._open: list[int] = []
        self._reserved: list[int] = []

    def wait_us(self, amount: int, now_us: int) -> int:
        """Return the time until this amount fits, rounded up to a microsecond; 0 if it fits now."""
        cost, window = amount * self._window_us, self.limit.amount * self._window_us
        return max(0, -(-(self._debt(now_us) + cost - window) // self.limit.amount))

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Charge a reservation; its number is higher than any before. More than fits leaves a debt."""
        cost, now = amount * self._window_us, now_us * self.limit.amount
        self._firsts.append(number)
        self._tats.append(now - self._moved)
        self._prune(len(self._firsts) - 1)
        self._open.append(number)
        self._reserved.append(cost)
        self._moved += cost
        self._latest = max(self._latest, now) + cost

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Close a reservation at its true cost; both amounts are in the limit's unit."""
        change = (actual - reserved) * self._window_us
        after = bisect_right(self._firsts, number)
        if change:
            self._tats[:after] = [tat + change for tat in self._tats[:after]]
            self._latest = self._moved + max(self._tats, default=-self._moved)
        index = bisect_left(self._open, number)
        if number in self._open[index : index + 1]:
            del self._open[index], self._reserved[index]
        self._prune(after)

    def forget(self, number: int) -> None:
        """Close a reservation at its reserved cost."""
        self.give_back(number, 0, 0)

    def status(self, now_us: int) -> LimitStatus:
        """Return the limit's state at this moment."""
        debt, window = self._debt(now_us), self.limit.amount * self._window_us
        remaining = max(0, window - debt) // self._window_us
        return LimitStatus(self.limit, remaining, -(-debt // self.limit.amount))

    def _debt(self, now_us: int) -> int:
        """Return the ticks until the bucket is full again."""
        return max(0, self._latest - now_us * self.limit.amount)

    def _prune(self, later: int) -> None:
        """Drop this candidate, or its neighbours, if they can never be the latest again."""
        while 0 < later < len(self._firsts):
            start = bisect_left(self._open, self._firsts[later - 1])
            end = bisect_left(self._open, self._firsts[later])
            lead = self._tats[later - 1] - self._tats[later]
            if lead >= sum(self._reserved[start:end]):
                del self._firsts[later], self._tats[later]
            elif start == end:
                del self._firsts[later - 1], self._tats[later - 1]
                return
            else:
                return


class CalendarMeter:
    """Counter that is reset at midnight UTC, or on the first of the month. Its time never goes back."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._alert_at = limit.alert_at
        # Start of the last period that had an alert.
        self._alerted_us = -1
        self._start_us = 0
        self._end_us = 0
        self._used = 0
        self._started_us: dict[int, int] = {}

    def wait_us(self, amount: int, now_us: int) -> int:
        """Return 0 if the amount fits into this period, else the time until the next one."""
        self._roll(now_us)
        return 0 if self._used + amount <= self.limit.amount else self._end_us - now_us

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Charge a reservation that fits."""
        self._roll(now_us)
        self._used += amount
        self._started_us[number] = self._start_us

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Close a reservation at its true cost; one of an earlier period does not change this one."""
        if self._started_us.pop(number, None) == self._start_us:
            self._used += actual - reserved

    @property
    def used(self) -> int:
        """Amount that the current period has used, reservations included."""
        return self._used

    @property
    def kept(self) -> tuple[int, int, int]:
        """Start of the current period, its used amount, and the start of the last period with an alert."""
        return self._start_us, self._used, self._alerted_us

    def restore(self, start_us: int, used: int, alerted_us: int) -> None:
        """Add what another process counted in a period, unless that is over."""
        if start_us < self._start_us:
            return
        if start_us > self._start_us:
            self._start_us, self._used = start_us, 0
            self._end_us = period_end_us(self.limit.period, start_us)
        self._used += used
        self._alerted_us = max(self._alerted_us, alerted_us)

    def take_alert(self) -> bool:
        """Return True once in a period: for the first settlement after which the alert is due."""
        if self._alert_at is None or self._used < self._alert_at or self._alerted_us == self._start_us:
            return False
        self._alerted_us = self._start_us
        return True

    def forget(self, number: int) -> None:
        """Close a reservation at its reserved cost."""
        self._started_us.pop(number, None)

    def status(self, now_us: int) -> LimitStatus:
        """Return the limit's state at this moment."""
        self._roll(now_us)
        return LimitStatus(self.limit, max(0, self.limit.amount - self._used), self._end_us - now_us)

    def _roll(self, now_us: int) -> None:
        if now_us >= self._end_us:
            self._start_us = period_start_us(self.limit.period, now_us)
            self._end_us = period_end_us(self.limit.period, now_us)
            self._used = 0


class FlightMeter:
    """Counter of requests in flight. Each has a lease that expires unless it is released or renewed.

    Invariant: all leases have one length and time never goes back, therefore they expire in the order in
    which they were taken.
    """

    def __init__(self, limit: Limit, lease_us: int) -> None:
        self.limit = limit
        self._lease_us = lease_us
        self._ends_us: dict[int, int] = {}

    def wait_us(self, amount: int, now_us: int) -> int:
        """Return 0 if a place is free, else one second: the duration of a request in flight is unknown."""
        self._expire(now_us)
        return 0 if len(self._ends_us) + amount <= self.limit.amount else SECOND_US

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Take a place."""
        del amount
        self._ends_us[number] = now_us + self._lease_us

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Free the place, whatever the request cost."""
        del reserved, actual
        self._ends_us.pop(number, None)

    def forget(self, number: int) -> None:
        """Do nothing: the place stays occupied until its lease expires."""

    def status(self, now_us: int) -> LimitStatus:
        """Return the free places; the reset is the expiry of the last lease."""
        self._expire(now_us)
        last_us = next(reversed(self._ends_us.values()), now_us)
        return LimitStatus(self.limit, max(0, self.limit.amount - len(self._ends_us)), last_us - now_us)

    def _expire(self, now_us: int) -> None:
        while self._ends_us:
            number, end_us = next(iter(self._ends_us.items()))
            if end_us > now_us:
                return
            del self._ends_us[number]


Meter: TypeAlias = RateMeter | CalendarMeter | FlightMeter


def meter_for(limit: Limit, lease_us: int) -> Meter:
    """Create the meter of a limit; lease_us: how long a request in flight may go unsettled."""
    if limit.period == "in_flight":
        return FlightMeter(limit, lease_us)
    return RateMeter(limit) if limit.period in WINDOWS_US else CalendarMeter(limit)


def period_start_us(period: Period, now_us: int) -> int:
    """Return the midnight, or the first of the month, UTC, at or before now."""
    now = _datetime(now_us)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return _microseconds(midnight if period == "day" else midnight.replace(day=1))


def period_end_us(period: Period, now_us: int) -> int:
    """Return the start of the next day or month, UTC."""
    start = _datetime(period_start_us(period, now_us))
    days = 1 if period == "day" else monthrange(start.year, start.month)[1]
    return _microseconds(start + timedelta(days=days))


def _datetime(now_us: int) -> datetime:
    return datetime.fromtimestamp(now_us // SECOND_US, UTC)


def _microseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * SECOND_US


class Price(msgspec.Struct, frozen=True):
    """Price of one token, in nano-units of the gateway's currency."""

    nano_per_token: int = 0
    currency: str = ""

    def cost(self, tokens: int, inputs: int = 0, images: int = 0, requests: int = 1) -> Cost:
        """Return the cost of a call with these counts."""
        money = min(AMOUNT_MAX, max(0, tokens) * self.nano_per_token)
        return Cost(requests, tokens, inputs, images, money, self.currency)

    def tokens_within(self, amounts: Iterable[tuple[Limit, int]]) -> int | None:
        """Return how many tokens amounts of limits are enough for, None if no limit counts tokens here."""
        return min(
            (found for limit, amount in amounts if (found := self._tokens_of(limit, amount)) is not None),
            default=None,
        )

    def _tokens_of(self, limit: Limit, amount: int) -> int | None:
        if limit.unit == "budget":
            return amount // self.nano_per_token if self.nano_per_token else None
        return amount if limit.unit == "tokens" else None


FREE = Price()
