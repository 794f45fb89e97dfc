"""The arithmetic of limits. Pure: time is an argument in integer microseconds, nothing awaits.

*What a limit promises.* Per second, minute, hour: no more than amount + amount × t ÷ window is admitted
in any span of length t. Per day and month (UTC): never more than the amount. `requests_in_flight`:
never more at once.

A rate limit is a generic cell rate algorithm (GCRA): its state is the theoretical arrival time (TAT), the
moment at which the bucket will be full again. A reservation moves TAT forward by its cost in time; a
correction must move it back to where it would be had the true cost been charged from the start. That is
not a subtraction: time in which the bucket was already full has been forgiven and must not come back. So
the bucket keeps, for each span between reservations that are still open, the TAT of a bucket that had
been full at the start of that span, a restart; the true TAT is their maximum, and a correction moves
only those that began before the corrected reservation.
"""

from bisect import bisect_left, bisect_right
from calendar import monthrange
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

import msgspec

Unit = Literal["requests", "tokens", "inputs"]
Period = Literal["second", "minute", "hour", "day", "month", "in_flight"]

SECOND_US = 1_000_000
WINDOWS_US: dict[Period, int] = {
    "second": SECOND_US,
    "minute": 60 * SECOND_US,
    "hour": 3600 * SECOND_US,
}


class Limit(msgspec.Struct, frozen=True, cache_hash=True):
    """At most `amount` of a unit in a period. scope: whose, if not the whole tenant's: "key <id> "."""

    unit: Unit
    period: Period
    amount: int
    scope: str = ""

    @property
    def name(self) -> str:
        """As router.yaml writes it, after what it is for if that is not the whole tenant."""
        period = "in_flight" if self.period == "in_flight" else f"per_{self.period}"
        return f"{self.scope}{self.unit}_{period}"


class Cost(msgspec.Struct, frozen=True):
    """What a call uses of each unit."""

    requests: int = 1
    tokens: int = 0
    inputs: int = 0

    def of(self, unit: Unit) -> int:
        """The part that a limit of this unit counts."""
        amount: int = getattr(self, unit)
        return amount


class LimitStatus(msgspec.Struct, frozen=True):
    """A limit as it is now: what is left, and in how many microseconds all of it is back."""

    limit: Limit
    remaining: int
    reset_us: int


def parse_limit(name: str, amount: int, scope: str = "") -> Limit:
    """A limit from its name in router.yaml, which the config has checked."""
    if name == "requests_in_flight":
        return Limit("requests", "in_flight", amount, scope)
    unit, _, period = name.partition("_per_")
    return msgspec.convert({"unit": unit, "period": period, "amount": amount, "scope": scope}, Limit)


class RateMeter:
    """GCRA with exact corrections, for limits per second, minute and hour.

    Time is counted in ticks, microseconds × the limit's amount: so every cost is a whole number of them,
    and a limit that does not divide its window is as exact as one that does.

    A restart can be dropped once no correction can make it the latest again. Of two neighbours only
    corrections of the reservations open between them change the lead of the earlier one. Each takes at
    most its reserve from it (a call that used more than its reserve adds to it), and is then no longer
    open: so a later restart that trails by at least the sum of those reserves trails for ever. With none
    of them open the lead is fixed, and the one behind is dropped, whichever it is. Neighbours are enough:
    one that trails an earlier restart so far trails the one between even further, as that one itself
    does not trail so far.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._window_us = WINDOWS_US[limit.period]
        # Each restart: the number of the first reservation after it, and its TAT less `_moved`.
        self._firsts: list[int] = []
        self._tats: list[int] = []
        self._moved = 0
        self._latest = 0
        # Each open reservation: its number and what it reserved, in ticks.
        self._open: list[int] = []
        self._held: list[int] = []

    def wait_us(self, amount: int, now_us: int) -> int:
        """How long until this amount fits, rounded up to a microsecond; 0 if it does now."""
        cost, window = amount * self._window_us, self.limit.amount * self._window_us
        return max(0, -(-(self._debt(now_us) + cost - window) // self.limit.amount))

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Charge a reservation; numbers rise, and the amount was found to fit."""
        cost, now = amount * self._window_us, now_us * self.limit.amount
        self._firsts.append(number)
        self._tats.append(now - self._moved)
        self._prune(len(self._firsts) - 1)
        self._open.append(number)
        self._held.append(cost)
        self._moved += cost
        self._latest = max(self._latest, now) + cost

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Close a reservation at its true cost; both amounts in the limit's unit."""
        change = (actual - reserved) * self._window_us
        after = bisect_right(self._firsts, number)
        if change:
            self._tats[:after] = [tat + change for tat in self._tats[:after]]
            self._latest = self._moved + max(self._tats, default=-self._moved)
        place = bisect_left(self._open, number)
        if number in self._open[place : place + 1]:
            del self._open[place], self._held[place]
        self._prune(after)

    def forget(self, number: int) -> None:
        """Close a reservation at what was reserved."""
        self.give_back(number, 0, 0)

    def status(self, now_us: int) -> LimitStatus:
        """What is left now."""
        debt, window = self._debt(now_us), self.limit.amount * self._window_us
        remaining = max(0, window - debt) // self._window_us
        return LimitStatus(self.limit, remaining, -(-debt // self.limit.amount))

    def _debt(self, now_us: int) -> int:
        """Ticks until the bucket is full again."""
        return max(0, self._latest - now_us * self.limit.amount)

    def _prune(self, later: int) -> None:
        """Drop the restart in this place, or those beside it, that can never be the latest again."""
        while 0 < later < len(self._firsts):
            start = bisect_left(self._open, self._firsts[later - 1])
            end = bisect_left(self._open, self._firsts[later])
            lead = self._tats[later - 1] - self._tats[later]
            if lead >= sum(self._held[start:end]):
                del self._firsts[later], self._tats[later]
            elif start == end:
                del self._firsts[later - 1], self._tats[later - 1]
                return
            else:
                return


class CalendarMeter:
    """A counter that starts again at midnight UTC, or on the first of the month. Its time never goes back."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._start_us = 0
        self._end_us = 0
        self._used = 0
        self._started_us: dict[int, int] = {}

    def wait_us(self, amount: int, now_us: int) -> int:
        """0 if the amount fits in what is left of this period, else the time to the next."""
        self._roll(now_us)
        return 0 if self._used + amount <= self.limit.amount else self._end_us - now_us

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Charge a reservation that was found to fit."""
        self._roll(now_us)
        self._used += amount
        self._started_us[number] = self._start_us

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """Close a reservation; one of an earlier period changes nothing in this one."""
        if self._started_us.pop(number, None) == self._start_us:
            self._used += actual - reserved

    def forget(self, number: int) -> None:
        """Close a reservation at what was reserved."""
        self._started_us.pop(number, None)

    def status(self, now_us: int) -> LimitStatus:
        """What is left now."""
        self._roll(now_us)
        return LimitStatus(self.limit, max(0, self.limit.amount - self._used), self._end_us - now_us)

    def _roll(self, now_us: int) -> None:
        if now_us >= self._end_us:
            self._start_us = period_start_us(self.limit.period, now_us)
            self._end_us = period_end_us(self.limit.period, now_us)
            self._used = 0


class FlightMeter:
    """How many calls are in flight; each holds a lease that ends by itself if nobody ends it.

    Invariant: leases are all of one length and time never goes back, so they end in the order in which
    they were taken.
    """

    def __init__(self, limit: Limit, lease_us: int) -> None:
        self.limit = limit
        self._lease_us = lease_us
        self._ends_us: dict[int, int] = {}

    def wait_us(self, amount: int, now_us: int) -> int:
        """0 if a slot is free, else a second: a call in flight ends nobody knows when."""
        self._expire(now_us)
        return 0 if len(self._ends_us) + amount <= self.limit.amount else SECOND_US

    def take(self, number: int, amount: int, now_us: int) -> None:
        """Take a slot."""
        del amount
        self._ends_us[number] = now_us + self._lease_us

    def give_back(self, number: int, reserved: int, actual: int) -> None:
        """The call is over: its slot is free, whatever it cost."""
        del reserved, actual
        self._ends_us.pop(number, None)

    def forget(self, number: int) -> None:
        """The slot stays taken until its lease ends."""

    def status(self, now_us: int) -> LimitStatus:
        """Free slots; reset is when the last lease ends at the latest."""
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
    """A fresh meter of the right kind; lease_us is how long a call in flight may go unsettled."""
    if limit.period == "in_flight":
        return FlightMeter(limit, lease_us)
    return RateMeter(limit) if limit.period in WINDOWS_US else CalendarMeter(limit)


def period_start_us(period: Period, now_us: int) -> int:
    """The midnight, or first of the month, UTC, at or before now."""
    now = _datetime(now_us)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return _microseconds(midnight if period == "day" else midnight.replace(day=1))


def period_end_us(period: Period, now_us: int) -> int:
    """The start of the next day or month, UTC."""
    start = _datetime(period_start_us(period, now_us))
    days = 1 if period == "day" else monthrange(start.year, start.month)[1]
    return _microseconds(start + timedelta(days=days))


def _datetime(now_us: int) -> datetime:
    return datetime.fromtimestamp(now_us // SECOND_US, UTC)


def _microseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * SECOND_US
