"""Quota ledger: the protocol (reserve, then settle or refund) and the ledger in memory.

Invariant: a reservation takes from all of its limits or from none, and is closed exactly once: by a
settlement, by a refund, or by its expiry, after which it counts as spent.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from gateway.config.money import in_currency
from gateway.errors import QuotaExceeded, RequestExceedsLimit
from gateway.events import BudgetAlert, Observe
from gateway.quotas.end_users import USERS_KEPT_DAYS, EndUser, EndUserDay, EndUserLimits
from gateway.quotas.limit_text import Bound, LimitText, format_duration, rate_limit_headers
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
from gateway.quotas.usage import NO_USAGE, TenantUsage, UsageBy, UsageRow, UsageSum, usage_rows

BELIEVED_US = SECOND_US
DAY_US = 24 * 3600 * SECOND_US


# OpenAI's clients ignore a longer one; the exact wait is in the message.
RETRY_AFTER_MAX_S = 60
# Lifetime of a place in flight that is neither released nor renewed: its gateway may have been killed.
LEASE_US = 15 * SECOND_US
# A ledger that is lost with its process needs no short leases, and renews nothing.
MEMORY_LEASE_US = 3600 * SECOND_US
# The cost of a refund.
NOTHING = Cost(requests=0)


class QuotaRequest(msgspec.Struct, frozen=True):
    """A request to take a cost from the limits of a tenant.

    id: makes a repeated reserve idempotent. expires_us: from now; an unsettled reservation then counts as
    spent. model: the name under which usage is recorded; without one, none is. key: id of the key that it is
    recorded for. end_user: that it is recorded for, too; None for none. shadow: count, but never refuse.
    is_bound: the tokens are an upper bound, not a count. is_lower_bound: the cost is the least that the call
    can have. calls: of which the cost is the sum.
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
    end_user: EndUser | None = None
    calls: int = 1

    def text(self, limit: Limit) -> LimitText:
        """Return the words for one of its limits."""
        return LimitText(limit, self.tenant, self.cost.currency)

    def cost_text(self, limit: Limit) -> str:
        """Describe what costs how much, in the unit of a limit."""
        bound: Bound = "lower" if self.is_lower_bound else "upper" if self.is_bound else None
        subject = "this call" if self.calls == 1 else f"this request of {self.calls} calls"
        return f"{subject} {self.text(limit).cost(self.cost.of(limit.unit), bound)}"

    def check_reachable(self) -> None:
        """Refuse at once a cost above a whole limit: it could never pass. Raises: RequestExceedsLimit."""
        for limit in self.limits:
            if self.cost.of(limit.unit) > limit.amount:
                raise RequestExceedsLimit(
                    f"{self.cost_text(limit)}, and {limit.name} is {self.text(limit).amount}: "
                    "it can never pass; send fewer or shorter inputs"
                )

    def refusal(
        self, limit: Limit, wait_us: int, limit_statuses: Sequence[LimitStatus], at_us: int
    ) -> QuotaExceeded:
        """Build the error for a limit without room: the exact wait, rounded up to whole seconds.

        limit_statuses: the known state of the limits. at_us: time of the request on the ledger's clock.
        """
        exact_s = -(-wait_us // SECOND_US)
        calendar = limit.period in ("day", "month")
        text = self.text(limit)
        remaining = next(
            (text.remaining(status.remaining) for status in limit_statuses if status.limit == limit), ""
        )
        restart = ""
        if calendar:
            restart = f"it starts again on {day_of(period_end_us(limit.period, at_us))} (UTC), "
        headers = rate_limit_headers(limit_statuses)
        if exact_s > RETRY_AFTER_MAX_S:
            headers["x-should-retry"] = "false"
        return QuotaExceeded(
            f"limit {text.name}: {remaining}{self.cost_text(limit)}; "
            f"{restart}try again in {format_duration(exact_s * SECOND_US)}",
            unit=limit.unit,
            calendar=calendar,
            retry_after_s=min(exact_s, RETRY_AFTER_MAX_S),
            headers=headers,
            wait_us=wait_us,
        )


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

    def settled_statuses(self, actual: Cost) -> tuple[LimitStatus, ...]:
        """Return the limits after the unused cost is given back, estimated from the reserve alone."""
        return tuple([_settled_status(each, self.request.cost, actual) for each in self.limit_statuses])


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


class Ledger(Protocol):
    """State of all quotas."""

    def refuse_if_spent(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request of at least this cost if it cannot pass, by what this process last saw.

        It never waits, and changes nothing. Raises: QuotaExceeded, QuotaUnavailable.
        """

    def has_ample_room(self, request: QuotaRequest) -> bool:
        """Return whether waiting for `reserve` would only cost time: it is all but certain to be admitted.

        False while another reserve of the tenant waits for the store, with which it travels then, and where
        there is no trip to save.
        """
        del request
        return False

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

    async def usage(self, tenant: str, days: Sequence[str], by: UsageBy = "model") -> list[UsageRow]:
        """Return the settled usage of those days (YYYY-MM-DD, UTC), by model, and by key or end user.

        Raises: QuotaUnavailable.
        """

    async def usage_sums(self, tenants: Sequence[str], days: Sequence[str]) -> dict[str, TenantUsage]:
        """Return the settled usage of several tenants, added up. days: today first.

        A tenant without usage may be absent. Raises: QuotaUnavailable.
        """

    async def limit_states(self, limits: Mapping[str, Sequence[Limit]]) -> dict[str, tuple[LimitStatus, ...]]:
        """Return the present states of limits, by tenant, and change nothing. None may be of end users.

        Raises: QuotaUnavailable.
        """

    async def forget_end_user(self, tenant: str, names: Collection[str]) -> int:
        """Count the usage of an end user as that of others, and drop its limits' state.

        names: under which it may have been counted. Return the number of days that had rows of it.
        Raises: QuotaUnavailable.
        """

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit, reservations included, or None if this process never saw it."""

    async def maintain(self) -> None:
        """Run background work, such as heartbeats, until cancelled."""

    async def aclose(self) -> None:
        """Send unsent settlements and close connections."""


class Report(msgspec.Struct, frozen=True):
    """State of one limit, at_us on the ledger's clock, which was seen_us on the clock of this process."""

    status: LimitStatus
    at_us: int
    seen_us: int

    def status_at(self, now_us: int) -> LimitStatus:
        """Return the state with the time that has passed since."""
        reset_us = max(0, self.status.reset_us - (now_us - self.seen_us))
        return LimitStatus(self.status.limit, self.status.remaining, reset_us)


class SpentLimits:
    """Limits of refused requests as the ledger last reported them, so that the next is refused cheaply.

    Rule: it refuses only what the ledger would refuse too. A report is believed for a second, because other
    gateways may give something back, and is dropped as soon as this process does. After that second one
    request a second passes, to bring a new report; many at once would all be read and decoded.
    now_us: a clock in microseconds.
    """

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._reports: dict[str, dict[Limit, Report]] = {}
        # When a request of the tenant was last let pass because its reports were old.
        self._passed_us: dict[str, int] = {}

    def record(self, tenant: str, limit_statuses: Sequence[LimitStatus], at_us: int) -> None:
        """Store the limits of a request that was refused at this time of the ledger's clock."""
        now_us = self._now_us()
        reports = self._reports.get(tenant, {})
        # Keys have limits of their own, so a tenant may have several reports at once.
        kept = {limit: report for limit, report in reports.items() if now_us - report.seen_us < BELIEVED_US}
        # End users may be many, and each report of a tenant is looked at here.
        new = {
            status.limit: Report(status, at_us, now_us)
            for status in limit_statuses
            if not status.limit.is_end_users
        }
        self._reports[tenant] = kept | new

    def forget(self, tenant: str) -> None:
        """Drop the reports of a tenant: something was taken or given back since."""
        # A tenant within its limits has none, and this is called for each of its requests.
        if self._reports.pop(tenant, None) is not None:
            self._passed_us.pop(tenant, None)

    def refuse(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request of at least this cost if a limit is known to block it, by the longest wait.

        Raises: QuotaExceeded.
        """
        reports = self._reports.get(tenant)
        if reports is None:
            return
        now_us = self._now_us()
        known = [reports[limit] for limit in limits if limit in reports]
        statuses = [report.status_at(now_us) for report in known]
        waits = [(_wait_of(status, least), status.limit) for status in statuses]
        wait_us, limit = max(waits, key=lambda wait: wait[0], default=(0, None))
        if limit is None or wait_us <= 0 or not self._believes(tenant, known, now_us):
            return
        at_us = max(report.at_us + now_us - report.seen_us for report in known)
        request = QuotaRequest("", tenant, limits, least, 0, is_lower_bound=True)
        raise request.refusal(limit, wait_us, statuses, at_us)

    def _believes(self, tenant: str, known: Sequence[Report], now_us: int) -> bool:
        """Return whether reports are recent enough, or a request that passed just now may renew them."""
        if all(now_us - report.seen_us < BELIEVED_US for report in known):
            return True
        passed_us = self._passed_us.get(tenant)
        if passed_us is not None and now_us - passed_us < BELIEVED_US:
            return True
        self._passed_us[tenant] = now_us
        return False


def _wait_of(status: LimitStatus, cost: Cost) -> int:
    """Return the microseconds until a cost fits into a limit, 0 or less if it fits now.

    A limit in flight never waits here: when a place becomes free is unknown.
    """
    limit = status.limit
    # Only a gateway's share admits more than its whole amount, when it is full.
    amount = min(cost.of(limit.unit), limit.amount)
    if limit.period == "in_flight" or status.remaining >= amount:
        return 0
    window_us = WINDOWS_US.get(limit.period)
    if window_us is None:
        return status.reset_us
    # The time until the bucket is full, less the part of it that may still be missing then.
    return status.reset_us - window_us + amount * window_us // limit.amount


class MemoryLedger(Ledger):
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
        # By tenant and day.
        self._users: defaultdict[tuple[str, str], EndUserDay] = defaultdict(EndUserDay)
        self._user_limits = EndUserLimits()
        self._spent = SpentLimits(self._now)

    def refuse_if_spent(self, tenant: str, limits: tuple[Limit, ...], least: Cost) -> None:
        """Refuse a request that cannot pass, by the last refusal. Raises: QuotaExceeded."""
        self._spent.refuse(tenant, limits, least)

    async def reserve(self, request: QuotaRequest) -> Reservation:
        """Take a cost from all limits, or from none. Raises: QuotaExceeded, RequestExceedsLimit."""
        now_us = self._now()
        self._expire(now_us)
        user = request.end_user
        counted = request.limits if user is None else self._counted(request, user, now_us)
        meters = [self._meter(request.tenant, limit) for limit in counted]
        if request.id in self._open:
            return Reservation(request, _statuses(request, meters, now_us))
        if not request.shadow and not self._is_share:
            request.check_reachable()
        waits = [meter.wait_us(self._fitting(request, meter.limit), now_us) for meter in meters]
        longest_us, blocking = max(zip(waits, request.limits, strict=True), key=_first, default=(0, None))
        over = blocking if longest_us > 0 else None
        if over is not None and not request.shadow:
            statuses = _statuses(request, meters, now_us)
            self._spent.record(request.tenant, statuses, now_us)
            raise request.refusal(over, longest_us, statuses, now_us)
        self._spent.forget(request.tenant)
        self._number += 1
        for meter in meters:
            meter.take(self._number, request.cost.of(meter.limit.unit), now_us)
        self._open[request.id] = (
            self._number,
            request if counted is request.limits else _with(request, counted),
        )
        heappush(self._expiries, (now_us + request.expires_us, self._number, request.id))
        if user is not None:
            self._keep_user_limits(request, meters, now_us)
        return Reservation(request, _statuses(request, meters, now_us), over=over, at_us=now_us)

    def settle(self, reservation: Reservation, actual: Cost) -> tuple[LimitStatus, ...]:
        """Correct a reservation to its actual cost and return the limits afterwards."""
        now_us = self._now()
        self._expire(now_us)
        request = reservation.request
        number, counted = self._open.pop(request.id, (None, request))
        meters = [self._meter(request.tenant, limit) for limit in counted.limits]
        if number is not None:
            for meter in meters:
                unit = meter.limit.unit
                meter.give_back(number, request.cost.of(unit), actual.of(unit))
            if request.model:
                self._record_usage(request, actual, now_us)
            if actual != request.cost:
                self._spent.forget(request.tenant)
        statuses = _statuses(request, meters, now_us)
        for meter, status in zip(meters, statuses, strict=True):
            if number is not None and isinstance(meter, CalendarMeter) and meter.take_alert():
                self._observe(budget_alert(request.tenant, status.limit, meter.used))
        return statuses

    async def usage(self, tenant: str, days: Sequence[str], by: UsageBy = "model") -> list[UsageRow]:
        """Return the usage that this process has settled since its start."""
        return [
            row for day in sorted(days) for row in usage_rows(tenant, day, self._counts(tenant, day, by), by)
        ]

    async def usage_sums(self, tenants: Sequence[str], days: Sequence[str]) -> dict[str, TenantUsage]:
        """Return the usage that this process has settled since its start. days: today first."""
        return {tenant: self._sums(tenant, days) for tenant in tenants}

    async def limit_states(self, limits: Mapping[str, Sequence[Limit]]) -> dict[str, tuple[LimitStatus, ...]]:
        """Return the present states of limits, by tenant."""
        now_us = self._now()
        self._expire(now_us)
        return {
            tenant: tuple(
                [
                    (self._meters.get((tenant, limit)) or meter_for(limit, self._lease_us)).status(now_us)
                    for limit in own
                ]
            )
            for tenant, own in limits.items()
        }

    async def forget_end_user(self, tenant: str, names: Collection[str]) -> int:
        """Count the usage of an end user as that of others; return the number of days with rows of it."""
        for limit in self._user_limits.forget(tenant, names):
            self._meters.pop((tenant, limit), None)
        return len(self._forget_in_memory(tenant, names))

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit, or None if it was never used."""
        meter = self._meters.get((tenant, limit))
        return None if meter is None else 1 - meter.status(self._now()).remaining / limit.amount

    async def flush(self) -> None:
        """Do nothing: no other gateway shares this ledger."""

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
        meter = self._meters.get(key)
        if meter is None:
            meter = meter_for(limit, self._lease_us)
            if not limit.is_end_users:
                # Callers name end users: one is kept only for what it has taken.
                self._meters[key] = meter
        return meter

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
        place = request.tenant, day_of(now_us)
        counts = self._usage[place].setdefault((request.model, request.key), {})
        for unit in UNITS:
            counts[unit] = counts.get(unit, 0) + actual.of(unit)
        if request.end_user is not None:
            if place not in self._users:
                self._forget_old_users(now_us)
            units = [(unit, amount) for unit in UNITS if (amount := actual.of(unit))]
            self._users[place].add(request.model, request.end_user, units)

    def _forget_in_memory(self, tenant: str, names: Collection[str]) -> set[str]:
        """Count the usage of an end user as that of others; return the days with rows of it."""
        return {day for (owner, day), users in self._users.items() if owner == tenant and users.forget(names)}

    def _forget_old_users(self, now_us: int) -> None:
        """Drop the usage by end user of days for which it is not kept any more."""
        first_day = day_of(now_us - USERS_KEPT_DAYS * DAY_US)
        for place in [place for place in self._users if place[1] < first_day]:
            del self._users[place]

    def _counts(self, tenant: str, day: str, by: UsageBy) -> Mapping[tuple[str, str], Mapping[str, int]]:
        """Return the usage of a day by model and key, or by model and end user."""
        if by != "end_user":
            return self._usage.get((tenant, day), {})
        users = self._users.get((tenant, day))
        return {} if users is None else users.counts

    def _sums(self, tenant: str, days: Sequence[str]) -> TenantUsage:
        """Return the usage of these days, of which the first is the latest, added up."""
        of_days = [self._usage.get((tenant, day), {}).values() for day in days]
        latest = UsageSum.of(of_days[0]) if of_days else NO_USAGE
        return TenantUsage(latest, UsageSum.of(units for counts in of_days for units in counts))

    def _counted(self, request: QuotaRequest, user: EndUser, now_us: int) -> Sequence[Limit]:
        """Return the limits that a request takes from: of all others, if there are too many end users."""
        counted, as_new = self._user_limits.counted(request.tenant, request.limits, user, now_us)
        for limit in as_new:
            self._meters.pop((request.tenant, limit), None)
        return counted

    def _keep_user_limits(self, request: QuotaRequest, meters: Sequence[Meter], now_us: int) -> None:
        """Keep the limits of an end user from which a reservation has taken."""
        statuses = [meter.status(now_us) for meter in meters]
        self._user_limits.record(request.tenant, statuses, request.expires_us, now_us)
        for meter in meters:
            self._meters[request.tenant, meter.limit] = meter

    def _now(self) -> int:
        # A wall clock that steps back must not admit more.
        self._latest_us = max(self._latest_us, self._now_us())
        return self._latest_us


def _with(request: QuotaRequest, limits: Sequence[Limit]) -> QuotaRequest:
    return msgspec.structs.replace(request, limits=tuple(limits))


def _first(pair: tuple[int, Limit]) -> int:
    return pair[0]


def _statuses(request: QuotaRequest, meters: Sequence[Meter], now_us: int) -> tuple[LimitStatus, ...]:
    """Return the state of a request's limits, under their own names."""
    statuses = tuple([meter.status(now_us) for meter in meters])
    if request.end_user is None:
        return statuses
    return tuple(
        msgspec.structs.replace(status, limit=limit)
        for status, limit in zip(statuses, request.limits, strict=True)
    )


def day_of(now_us: int) -> str:
    """Return the UTC day under which usage is recorded: YYYY-MM-DD."""
    return datetime.fromtimestamp(now_us // SECOND_US, UTC).date().isoformat()


def budget_alert(tenant: str, limit: Limit, used: int) -> BudgetAlert:
    """Return the alert for a budget of which this much is used."""
    return BudgetAlert(tenant, limit.name, in_currency(used), in_currency(limit.amount))


async def remaining_budgets(ledger: Ledger, tenant: str, limits: Iterable[Limit]) -> dict[str, float]:
    """Return what is left of each budget among limits, by its name; nothing while the store is away.

    A reservation of nothing reads them: they are those that the next call would meet. Without a budget there
    is no trip to the store. Raises: QuotaUnavailable.
    """
    budgets = tuple(dict.fromkeys(limit for limit in limits if limit.unit == "budget"))
    if not budgets:
        return {}
    request = QuotaRequest(secrets.token_hex(8), tenant, budgets, NOTHING, LEASE_US, shadow=True)
    reservation = await ledger.reserve(request)
    ledger.settle(reservation, NOTHING)
    if reservation.degraded:
        # These are shares of one gateway.
        return {}
    return {status.limit.name: in_currency(status.remaining) for status in reservation.limit_statuses}
