"""Who has used how much: reserve, then settle or refund. The protocol, and the ledger in memory.

Invariant: a reservation takes all of its limits or none, and is closed exactly once: by a settlement, a
refund, or its end, at which it counts as spent.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from gateway.errors import QuotaExceeded, RequestExceedsLimit
from gateway.quotas.limits import (
    SECOND_US,
    WINDOWS_US,
    Cost,
    Limit,
    LimitStatus,
    Meter,
    Unit,
    meter_for,
    period_end_us,
)
from gateway.quotas.usage import UsageRow

# OpenAI's clients stop honouring a longer one; the exact wait is in the message.
RETRY_AFTER_MAX_S = 60
# How long a call in flight holds its slot if nobody ends or renews it: a gateway may have been killed.
LEASE_US = 15 * SECOND_US
# A ledger that dies with its process needs no such haste, and renews nothing.
MEMORY_LEASE_US = 3600 * SECOND_US
UNITS: tuple[Unit, ...] = ("requests", "tokens", "inputs")
HEADERS = {
    unit: tuple(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset")) for unit in UNITS
}
# What "nothing was used" costs.
NOTHING = Cost(requests=0)


class QuotaRequest(msgspec.Struct, frozen=True):
    """A wish to use something.

    id: makes a repeated reserve the same one. expires_us: from now; unsettled by then, it is spent.
    model: under whose name it appears in the usage. shadow: count, but never refuse. is_bound: its tokens
    are not counted, but the most that they can be.
    """

    id: str
    tenant: str
    limits: tuple[Limit, ...]
    cost: Cost
    expires_us: int
    model: str = ""
    shadow: bool = False
    is_bound: bool = False


class Reservation(msgspec.Struct, frozen=True):
    """What a call holds until it is settled.

    limit_statuses: its limits after it was taken. degraded: counted here, because the shared store is away.
    over: the limit that would have refused it, where the ask was a shadow's. at_us: when, on the ledger's
    clock.
    """

    request: QuotaRequest
    limit_statuses: tuple[LimitStatus, ...]
    degraded: bool = False
    over: Limit | None = None
    at_us: int = 0


class Ledger(Protocol):
    """The state of all quotas."""

    async def reserve(self, ask: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Make the reserve true, once; a second time changes nothing. Never raises, and waits for nothing:
        a ledger that is shared is told later.

        Returns the limits as they stand then, as far as is known here.
        """

    async def flush(self) -> None:
        """Wait until everything that was settled so far has been told to whoever shares this ledger.

        Raises: QuotaUnavailable; it is told when the store is back.
        """

    async def usage(self, tenant: str, days: Sequence[str]) -> list[UsageRow]:
        """What was settled on those days (YYYY-MM-DD, UTC).

        Raises: QuotaUnavailable.
        """

    async def maintain(self) -> None:
        """Whatever must go on beside the calls; runs until cancelled."""

    async def aclose(self) -> None:
        """Tell what has not been told yet, and let go of connections."""


class MemoryLedger:
    """Quotas of one process. now_us: the wall clock in microseconds; days and months need it."""

    def __init__(self, now_us: Callable[[], int] | None = None, lease_us: int = MEMORY_LEASE_US) -> None:
        self._lease_us = lease_us
        self._now_us = now_us or (lambda: time.time_ns() // 1000)
        self._latest_us = 0
        self._number = 0
        self._meters: dict[tuple[str, Limit], Meter] = {}
        self._open: dict[str, tuple[int, QuotaRequest]] = {}
        # Ends of reservations, soonest first; those of closed ones stay until their time comes.
        self._ends: list[tuple[int, int, str]] = []
        self._usage: dict[tuple[str, str, str], dict[Unit, int]] = defaultdict(dict)

    async def reserve(self, ask: QuotaRequest) -> Reservation:
        """Raises: QuotaExceeded, RequestExceedsLimit."""
        now_us = self._now()
        self._expire(now_us)
        meters = [self._meter(ask.tenant, limit) for limit in ask.limits]
        if ask.id in self._open:
            return Reservation(ask, tuple(meter.status(now_us) for meter in meters))
        if not ask.shadow:
            check_reachable(ask)
        waits = [(meter.wait_us(ask.cost.of(meter.limit.unit), now_us), meter) for meter in meters]
        longest_us, blocking = max(waits, key=lambda one: one[0], default=(0, None))
        over = blocking.limit if blocking is not None and longest_us > 0 else None
        if over is not None and not ask.shadow:
            raise refusal(ask, over, longest_us, [meter.status(now_us) for meter in meters], now_us)
        self._number += 1
        for meter in meters:
            meter.take(self._number, ask.cost.of(meter.limit.unit), now_us)
        self._open[ask.id] = (self._number, ask)
        heappush(self._ends, (now_us + ask.expires_us, self._number, ask.id))
        return Reservation(ask, tuple(meter.status(now_us) for meter in meters), over=over, at_us=now_us)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """The limits after the correction."""
        now_us = self._now()
        self._expire(now_us)
        ask = reservation.request
        meters = [self._meter(ask.tenant, limit) for limit in ask.limits]
        number, _ = self._open.pop(ask.id, (None, ask))
        if number is not None:
            for meter in meters:
                unit = meter.limit.unit
                meter.give_back(number, ask.cost.of(unit), actual.of(unit))
            self._count(ask, actual, now_us)
        return tuple(meter.status(now_us) for meter in meters)

    async def flush(self) -> None:
        """Nobody else has to be told."""

    async def usage(self, tenant: str, days: Sequence[str]) -> list[UsageRow]:
        """Of this process, since it started."""
        return [
            UsageRow(tenant, day, model, **counts)
            for (owner, day, model), counts in sorted(self._usage.items())
            if owner == tenant and day in days
        ]

    async def maintain(self) -> None:
        """Nothing has to go on."""

    async def aclose(self) -> None:
        """Nothing is connected."""

    def forget(self, tenant: str, limit: Limit) -> None:
        """Start a limit anew; what is open of it changes it no more."""
        self._meters.pop((tenant, limit), None)

    def _meter(self, tenant: str, limit: Limit) -> Meter:
        key = (tenant, limit)
        if key not in self._meters:
            self._meters[key] = meter_for(limit, self._lease_us)
        return self._meters[key]

    def _expire(self, now_us: int) -> None:
        """What was not settled by its end counts as spent."""
        while self._ends and self._ends[0][0] <= now_us:
            _, number, id_ = heappop(self._ends)
            # An id may have been closed and used again since: that reservation has an end of its own.
            if self._open.get(id_, (0, None))[0] == number:
                _, ask = self._open.pop(id_)
                for limit in ask.limits:
                    self._meter(ask.tenant, limit).forget(number)

    def _count(self, ask: QuotaRequest, actual: Cost, now_us: int) -> None:
        counts = self._usage[ask.tenant, day_of(now_us), ask.model]
        for unit in UNITS:
            counts[unit] = counts.get(unit, 0) + actual.of(unit)

    def _now(self) -> int:
        # A wall clock that steps back must not give anyone more.
        self._latest_us = max(self._latest_us, self._now_us())
        return self._latest_us


def day_of(now_us: int) -> str:
    """The day in UTC, as usage is kept by: YYYY-MM-DD."""
    return datetime.fromtimestamp(now_us // SECOND_US, UTC).date().isoformat()


def check_reachable(ask: QuotaRequest) -> None:
    """A call that costs more than a whole limit could wait for ever: say so at once.

    Raises: RequestExceedsLimit.
    """
    for limit in ask.limits:
        cost = ask.cost.of(limit.unit)
        if cost > limit.amount:
            raise RequestExceedsLimit(
                f"this call {_costs(ask, limit)}, and {limit.name} is {limit.amount}: it can never "
                "pass; send fewer or shorter inputs"
            )


def _costs(ask: QuotaRequest, limit: Limit) -> str:
    """What a call uses of a limit, and whether that was counted."""
    cost, unit = ask.cost.of(limit.unit), limit.unit
    named = unit.removesuffix("s") if cost == 1 else unit
    if unit == "tokens" and ask.is_bound:
        return f"may cost up to {cost} {named}, by its length"
    return f"costs {cost} {named}"


def corrected(reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
    """A reservation's limits once what it did not use is back, as far as one who only reserved can tell."""
    return tuple([_corrected(one, reservation.request.cost, actual) for one in reservation.limit_statuses])


def _corrected(standing: LimitStatus, reserved: Cost, actual: Cost) -> LimitStatus:
    limit = standing.limit
    back = 1 if limit.period == "in_flight" else reserved.of(limit.unit) - actual.of(limit.unit)
    if not back:
        return standing
    remaining = min(limit.amount, max(0, standing.remaining + back))
    reset_us = standing.reset_us
    if limit.period in WINDOWS_US:
        reset_us = max(0, reset_us + -(back * WINDOWS_US[limit.period] // limit.amount))
    elif limit.period == "in_flight" and remaining == limit.amount:
        reset_us = 0
    return LimitStatus(limit, remaining, reset_us)


def refusal(
    ask: QuotaRequest,
    limit: Limit,
    wait_us: int,
    limit_statuses: Sequence[LimitStatus],
    at_us: int | None = None,
) -> QuotaExceeded:
    """What a caller hears whose limit has no room: the exact wait, rounded up to whole seconds.

    limit_statuses: what is known of the limits. at_us: when it was asked, on the ledger's clock; None where
    what is waited for is not the limit's next period.
    """
    exact_s = -(-wait_us // SECOND_US)
    calendar = limit.period in ("day", "month")
    left = next((_left(one) for one in limit_statuses if one.limit == limit), "")
    anew = ""
    if calendar and at_us is not None:
        anew = f"it starts anew on {day_of(period_end_us(limit.period, at_us))} (UTC), "
    headers = rate_limit_headers(limit_statuses)
    if exact_s > RETRY_AFTER_MAX_S:
        headers["x-should-retry"] = "false"
    return QuotaExceeded(
        f"limit {limit.name} ({limit.amount}): {left}this call {_costs(ask, limit)}; "
        f"{anew}try again in {duration(exact_s * SECOND_US)}",
        unit=limit.unit,
        calendar=calendar,
        retry_after_s=min(exact_s, RETRY_AFTER_MAX_S),
        headers=headers,
    )


def _left(standing: LimitStatus) -> str:
    """What remains, before what is asked for."""
    match standing.remaining:
        case 0:
            return "nothing is left, and "
        case 1:
            return "1 is left, and "
    return f"{standing.remaining} are left, and "


def rate_limit_headers(limit_statuses: Sequence[LimitStatus]) -> dict[str, str]:
    """OpenAI's x-ratelimit-*: for each unit, the limit with the least remaining share."""
    tightest: dict[Unit, tuple[float, LimitStatus]] = {}
    for one in limit_statuses:
        unit, share = one.limit.unit, one.remaining / max(1, one.limit.amount)
        if unit not in tightest or share < tightest[unit][0]:
            tightest[unit] = share, one
    headers: dict[str, str] = {}
    for unit, (_, one) in tightest.items():
        limit, remaining, reset = HEADERS[unit]
        headers[limit] = str(one.limit.amount)
        headers[remaining] = str(one.remaining)
        # Nobody knows when a slot in flight is free again: a moment, not the end of its lease.
        reset_us = min(one.reset_us, SECOND_US) if one.limit.period == "in_flight" else one.reset_us
        headers[reset] = duration(reset_us)
    return headers


def duration(microseconds: int) -> str:
    """As OpenAI writes it: 1h2m3s, 6m0s, 1.25s, 20ms; rounded up to the millisecond."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms // 1000}s" if rest_ms % 1000 == 0 else f"{rest_ms / 1000:g}s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes or hours else "") + seconds
