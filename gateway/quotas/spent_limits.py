"""Limits of refused requests as the ledger last reported them, so that the next one is refused cheaply.

Rule: it refuses only what the ledger would refuse too. A report is believed for a second, because other
gateways may give something back, and is dropped as soon as this process does. After that second one request a
second passes, to bring a new report; many at once would all be read and decoded.
"""

from collections.abc import Callable, Sequence

import msgspec

from gateway.quotas.limits import SECOND_US, WINDOWS_US, Cost, Limit, LimitStatus

BELIEVED_US = SECOND_US


class Report(msgspec.Struct, frozen=True):
    """State of one limit, at_us on the ledger's clock, which was seen_us on the clock of this process."""

    status: LimitStatus
    at_us: int
    seen_us: int


class SpentLimit(msgspec.Struct, frozen=True):
    """Limit that blocks a request, the time until it has room, and the state of all known limits by now."""

    limit: Limit
    wait_us: int
    limit_statuses: tuple[LimitStatus, ...]
    at_us: int


class SpentLimits:
    """Reports of the limits of tenants whose last request was refused. now_us: a clock in microseconds."""

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
        new = {status.limit: Report(status, at_us, now_us) for status in limit_statuses}
        self._reports[tenant] = kept | new

    def forget(self, tenant: str) -> None:
        """Drop the reports of a tenant: something was taken or given back since."""
        # A tenant within its limits has none, and this is called for each of its requests.
        if self._reports.pop(tenant, None) is not None:
            self._passed_us.pop(tenant, None)

    def blocking(self, tenant: str, limits: Sequence[Limit], least: Cost) -> SpentLimit | None:
        """Return the limit that longest blocks a request of at least this cost, or None if none is known."""
        reports = self._reports.get(tenant)
        if reports is None:
            return None
        now_us = self._now_us()
        known = [reports[limit] for limit in limits if limit in reports]
        statuses = tuple([_aged(report.status, now_us - report.seen_us) for report in known])
        waits = [(wait_of(status, least), status.limit) for status in statuses]
        wait_us, limit = max(waits, key=lambda wait: wait[0], default=(0, None))
        if limit is None or wait_us <= 0:
            return None
        if not self._believes(tenant, known, now_us):
            return None
        at_us = max(report.at_us + now_us - report.seen_us for report in known)
        return SpentLimit(limit, wait_us, statuses, at_us)

    def _believes(self, tenant: str, known: Sequence[Report], now_us: int) -> bool:
        """Return whether reports are recent enough, or a request that passed just now may renew them."""
        if all(now_us - report.seen_us < BELIEVED_US for report in known):
            return True
        passed_us = self._passed_us.get(tenant)
        if passed_us is not None and now_us - passed_us < BELIEVED_US:
            return True
        self._passed_us[tenant] = now_us
        return False


def wait_of(status: LimitStatus, cost: Cost) -> int:
    """Return the microseconds until a cost fits into a limit, 0 or less if it fits now.

    A limit in flight never waits here: when a slot becomes free is unknown.
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


def _aged(status: LimitStatus, elapsed_us: int) -> LimitStatus:
    return LimitStatus(status.limit, status.remaining, max(0, status.reset_us - elapsed_us))
