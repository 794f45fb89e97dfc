"""Quota ledger: the protocol (reserve, then settle or refund) and the ledger in memory.

Invariant: a reservation takes from all of its limits or from none, and is closed exactly once: by a
settlement, by a refund, or by its expiry, after which it counts as spent.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from gateway.config.money import in_currency
from gateway.errors import QuotaExceeded, RequestExceedsLimit
from gateway.events import BudgetAlert, Observe
from gateway.quotas.headers import format_duration, rate_limit_headers
from gateway.quotas.limit_text import Bound, LimitText
from gateway.quotas.limits import (
    SECOND_US,
    UNITS,
    WINDOWS_US,
    CalendarMeter,
    Cost,
    Limit,
    LimitStatus,
    Meter,
    meter_for,
    period_end_us,
)
from gateway.quotas.spent_limits import SpentLimits
from gateway.quotas.usage import UsageRow, usage_rows

# OpenAI's clients ignore a longer one; the exact wait is in the message.
RETRY_AFTER_MAX_S = 60
# Lifetime of a slot in flight that is neither released nor renewed: its gateway may have been killed.
LEASE_US = 15 * SECOND_US
# A ledger that is lost with its process needs no short leases, and renews nothing.
MEMORY_LEASE_US = 3600 * SECOND_US
# The cost of a refund.
NOTHING = Cost(requests=0)


class QuotaRequest(msgspec.Struct, frozen=True):
    """A request to take a cost from the limits of a tenant.

    id: makes a repeated reserve idempotent. expires_us: from now; an unsettled reservation then counts as
    spent. model: the name under which usage is recorded; without one, none is. key: id of the key that it is
    recorded for. shadow: count, but never
    refuse. is_bound: the tokens are an upper bound, not a count. is_lower_bound: the cost is the least that
    the call can have.
    """

    id: str
    tenant: str
    limits: tuple[Limit, ...]
    cost: Cost
    expires_us: int
    model: str = ""
    shadow: bool = False
    is_bound: bool = False
    is_lower_bound: bool = False
    key: str = ""


class Reservation(msgspec.Struct, frozen=True):
    """The amounts reserved for a request until it is settled.

    limit_statuses: the limits after the reserve. degraded: counted by this gateway only, because the shared
    store is down. over: the limit that would have refused a shadow request. at_us: the time of the reserve,
    on the ledger's clock.
    """

    request: QuotaRequest
    limit_statuses: tuple[LimitStatus, ...]
    degraded: bool = False
    over: Limit | None = None
    at_us: int = 0


class Ledger(Protocol):
    """State of all quotas."""

    def refuse_if_spent(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request of at least this cost if it cannot pass, by what this process last saw.

        It never waits, and changes nothing. Raises: QuotaExceeded, QuotaUnavailable.
        """

    def has_ample_room(self, request: QuotaRequest) -> bool:
        """Return whether waiting for `reserve` would only cost time: it is all but certain to be admitted.

        False while another reserve of the tenant waits for the store: both travel together then.
        """

    async def reserve(self, request: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none.

        Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable.
        """

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Correct a reservation to its actual cost and return the limits afterwards.

        The first settlement counts; a second changes nothing. It never raises and never waits: a shared
        ledger writes to its store later, and returns the limits as far as this gateway knows them.
        """

    async def flush(self) -> None:
        """Wait until the shared store has every settlement sent so far.

        Raises: QuotaUnavailable; the settlements are then sent when the store is up again.
        """

    async def usage(self, tenant: str, days: Sequence[str], *, by_key: bool = False) -> list[UsageRow]:
        """Return the settled usage of those days (YYYY-MM-DD, UTC), by model, or by model and key.

        Raises: QuotaUnavailable.
        """

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit, reservations included, or None if this process never saw it."""

    async def maintain(self) -> None:
        """Run background work, such as heartbeats, until cancelled."""

    async def aclose(self) -> None:
        """Send unsent settlements and close connections."""


class MemoryLedger:
    """Quotas of one process. now_us: the wall clock in microseconds; days and months need it.

    is_share: the limits are parts of larger ones. A rate that is full admits a call above its amount, and
    refuses others until that debt is paid.
    """

    def __init__(
        self,
        now_us: Callable[[], int] | None = None,
        lease_us: int = MEMORY_LEASE_US,
        observe: Observe = lambda _: None,
        *,
        is_share: bool = False,
    ) -> None:
        self._observe = observe
        self._is_share = is_share
        self._lease_us = lease_us
        self._now_us = now_us or (lambda: time.time_ns() // 1000)
        self._latest_us = 0
        self._number = 0
        self._meters: dict[tuple[str, Limit], Meter] = {}
        self._open: dict[str, tuple[int, QuotaRequest]] = {}
        # Expiries of reservations, soonest first; those of closed ones stay until their time comes.
        self._expiries: list[tuple[int, int, str]] = []
        # By tenant and day, then by model and key.
        self._usage: dict[tuple[str, str], dict[tuple[str, str], dict[str, int]]] = defaultdict(dict)
        self._spent = SpentLimits(self._now)

    def refuse_if_spent(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request that cannot pass, by the last refusal. Raises: QuotaExceeded."""
        refuse_if_spent(self._spent, tenant, limits, least)

    def has_ample_room(self, request: QuotaRequest) -> bool:
        """Return False: there is no trip to save."""
        del request
        return False

    async def reserve(self, request: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none. Raises: QuotaExceeded, RequestExceedsLimit."""
        now_us = self._now()
        self._expire(now_us)
        meters = [self._meter(request.tenant, limit) for limit in request.limits]
        if request.id in self._open:
            return Reservation(request, tuple(meter.status(now_us) for meter in meters))
        if not request.shadow and not self._is_share:
            check_reachable(request)
        waits = [(meter.wait_us(self._fitting(request, meter.limit), now_us), meter) for meter in meters]
        longest_us, blocking = max(waits, key=lambda wait: wait[0], default=(0, None))
        over = blocking.limit if blocking is not None and longest_us > 0 else None
        if over is not None and not request.shadow:
            statuses = [meter.status(now_us) for meter in meters]
            self._spent.record(request.tenant, statuses, now_us)
            raise refusal(request, over, longest_us, statuses, now_us)
        self._spent.forget(request.tenant)
        self._number += 1
        for meter in meters:
            meter.take(self._number, request.cost.of(meter.limit.unit), now_us)
        self._open[request.id] = (self._number, request)
        heappush(self._expiries, (now_us + request.expires_us, self._number, request.id))
        return Reservation(request, tuple(meter.status(now_us) for meter in meters), over=over, at_us=now_us)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Correct a reservation to its actual cost and return the limits afterwards."""
        now_us = self._now()
        self._expire(now_us)
        request = reservation.request
        meters = [self._meter(request.tenant, limit) for limit in request.limits]
        number, _ = self._open.pop(request.id, (None, request))
        if number is not None:
            for meter in meters:
                unit = meter.limit.unit
                meter.give_back(number, request.cost.of(unit), actual.of(unit))
            if request.model:
                self._record_usage(request, actual, now_us)
            if actual != request.cost:
                self._spent.forget(request.tenant)
        statuses = tuple(meter.status(now_us) for meter in meters)
        for meter, status in zip(meters, statuses, strict=True):
            if number is not None and isinstance(meter, CalendarMeter) and meter.take_alert():
                self._observe(budget_alert(request.tenant, status.limit, meter.used))
        return statuses

    async def flush(self) -> None:
        """Do nothing: no other gateway shares this ledger."""

    async def usage(self, tenant: str, days: Sequence[str], *, by_key: bool = False) -> list[UsageRow]:
        """Return the usage that this process has settled since its start."""
        return [
            row
            for day in sorted(days)
            for row in usage_rows(tenant, day, self._usage.get((tenant, day), {}), by_key=by_key)
        ]

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit, or None if it was never used."""
        meter = self._meters.get((tenant, limit))
        return None if meter is None else 1 - meter.status(self._now()).remaining / limit.amount

    async def maintain(self) -> None:
        """Do nothing: there is no background work."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def forget(self, tenant: str, limit: Limit) -> None:
        """Reset a limit; reservations that are open no longer change it."""
        self._meters.pop((tenant, limit), None)
        self._spent.forget(tenant)

    def _fitting(self, request: QuotaRequest, limit: Limit) -> int:
        """Return the amount that must fit into a limit for a request to pass."""
        cost = request.cost.of(limit.unit)
        return min(cost, limit.amount) if self._is_share and limit.period in WINDOWS_US else cost

    def _calendars(self) -> Iterator[tuple[str, CalendarMeter]]:
        """Yield each meter of a day or month, with its tenant."""
        for (tenant, _), meter in self._meters.items():
            if isinstance(meter, CalendarMeter):
                yield tenant, meter

    def _meter(self, tenant: str, limit: Limit) -> Meter:
        key = (tenant, limit)
        if key not in self._meters:
            self._meters[key] = meter_for(limit, self._lease_us)
        return self._meters[key]

    def _expire(self, now_us: int) -> None:
        """Count expired reservations as spent."""
        while self._expiries and self._expiries[0][0] <= now_us:
            _, number, id_ = heappop(self._expiries)
            # An id may have been closed and used again since: the later reservation has its own expiry.
            if self._open.get(id_, (0, None))[0] == number:
                _, request = self._open.pop(id_)
                for limit in request.limits:
                    self._meter(request.tenant, limit).forget(number)

    def _record_usage(self, request: QuotaRequest, actual: Cost, now_us: int) -> None:
        counts = self._usage[request.tenant, day_of(now_us)].setdefault((request.model, request.key), {})
        for unit in UNITS:
            counts[unit] = counts.get(unit, 0) + actual.of(unit)

    def _now(self) -> int:
        # A wall clock that steps back must not admit more.
        self._latest_us = max(self._latest_us, self._now_us())
        return self._latest_us


def day_of(now_us: int) -> str:
    """Return the UTC day under which usage is recorded: YYYY-MM-DD."""
    return datetime.fromtimestamp(now_us // SECOND_US, UTC).date().isoformat()


def refuse_if_spent(spent: SpentLimits, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
    """Refuse a request of at least this cost if a limit is known to have no room. Raises: QuotaExceeded."""
    blocking = spent.blocking(tenant, limits, least)
    if blocking is not None:
        request = QuotaRequest("", tenant, limits, least, 0, is_lower_bound=True)
        raise refusal(request, blocking.limit, blocking.wait_us, blocking.limit_statuses, blocking.at_us)


def check_reachable(request: QuotaRequest) -> None:
    """Refuse at once a request that costs more than a whole limit: it could never pass.

    Raises: RequestExceedsLimit.
    """
    for limit in request.limits:
        cost = request.cost.of(limit.unit)
        if cost > limit.amount:
            text = LimitText(limit, request.tenant, request.cost.currency)
            raise RequestExceedsLimit(
                f"this call {cost_text(request, text)}, and {limit.name} is {text.amount}: it can never "
                "pass; send fewer or shorter inputs"
            )


def cost_text(request: QuotaRequest, text: LimitText) -> str:
    """Describe the cost of a request in the unit of a limit."""
    bound: Bound = "lower" if request.is_lower_bound else "upper" if request.is_bound else None
    return text.cost(request.cost.of(text.limit.unit), bound)


def settled_statuses(reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
    """Return a reservation's limits after its unused cost is given back, estimated from the reserve alone."""
    cost = reservation.request.cost
    return tuple([_settled_status(status, cost, actual) for status in reservation.limit_statuses])


def _settled_status(status: LimitStatus, reserved: Cost, actual: Cost) -> LimitStatus:
    limit = status.limit
    unused = 1 if limit.period == "in_flight" else reserved.of(limit.unit) - actual.of(limit.unit)
    if not unused:
        return status
    remaining = min(limit.amount, max(0, status.remaining + unused))
    reset_us = status.reset_us
    if limit.period in WINDOWS_US:
        reset_us = max(0, reset_us + -(unused * WINDOWS_US[limit.period] // limit.amount))
    elif limit.period == "in_flight" and remaining == limit.amount:
        reset_us = 0
    return LimitStatus(limit, remaining, reset_us)


def refusal(
    request: QuotaRequest,
    limit: Limit,
    wait_us: int,
    limit_statuses: Sequence[LimitStatus],
    at_us: int | None = None,
) -> QuotaExceeded:
    """Build the error for a limit without room: the exact wait, rounded up to whole seconds.

    limit_statuses: the known state of the limits. at_us: time of the request on the ledger's clock; None if
    the request does not wait for the limit's next period.
    """
    exact_s = -(-wait_us // SECOND_US)
    calendar = limit.period in ("day", "month")
    text = LimitText(limit, request.tenant, request.cost.currency)
    remaining = next(
        (text.remaining(status.remaining) for status in limit_statuses if status.limit == limit), ""
    )
    restart = ""
    if calendar and at_us is not None:
        restart = f"it starts again on {day_of(period_end_us(limit.period, at_us))} (UTC), "
    headers = rate_limit_headers(limit_statuses)
    if exact_s > RETRY_AFTER_MAX_S:
        headers["x-should-retry"] = "false"
    return QuotaExceeded(
        f"limit {text.name}: {remaining}this call {cost_text(request, text)}; "
        f"{restart}try again in {format_duration(exact_s * SECOND_US)}",
        unit=limit.unit,
        calendar=calendar,
        retry_after_s=min(exact_s, RETRY_AFTER_MAX_S),
        headers=headers,
    )


def budget_alert(tenant: str, limit: Limit, used: int) -> BudgetAlert:
    """Return the alert for a budget of which this much is used."""
    return BudgetAlert(tenant, limit.name, in_currency(used), in_currency(limit.amount))
