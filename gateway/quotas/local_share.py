"""Quotas while the shared store is down: this gateway's share of every limit."""

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import msgspec

from gateway.errors import QuotaExceeded
from gateway.quotas.end_users import EndUser
from gateway.quotas.ledger import (
    LEASE_US,
    NOTHING,
    MemoryLedger,
    QuotaRequest,
    Reservation,
)
from gateway.quotas.limits import (
    OTHER_USERS,
    SECOND_US,
    UNITS,
    WINDOWS_US,
    Cost,
    Limit,
    LimitStatus,
    Unit,
    period_end_us,
)
from gateway.quotas.operations import LimitState, decode_statuses

# With room for this many requests in flight, and half of the limit free, requests hardly ever wait for it.
FREE_IN_FLIGHT_MIN = 64
# What a request that does not wait for its reserve leaves in each limit, as a multiple of its cost, and how
# old the state may be that shows it.
AMPLE_COSTS = 100
AMPLE_US = 10 * SECOND_US
# Advice to a caller who waits for the end of an outage, which is unknown.
OUTAGE_RETRY_S = 10


class OfflineUsage(msgspec.Struct, frozen=True):
    """Usage of a tenant that was counted without the store and is still to be charged there.

    Either usage of a model on a day (YYYY-MM-DD, UTC), or of one rate limit, without a day.
    """

    tenant: str
    limits: tuple[Limit, ...]
    cost: Cost
    model: str = ""
    day: str = ""
    key: str = ""
    end_user: EndUser | None = None

    def charge(self, today: str) -> QuotaRequest:
        """Build the request that charges it, whether it fits or not, but not to a period that is over.

        Each has a new id: the store may have received an earlier one, which is then refunded.
        """
        ended = {"day": today != self.day, "month": today[:7] != self.day[:7]}
        limits = tuple([limit for limit in self.limits if not ended.get(limit.period)])
        id_ = f"owed-{secrets.token_hex(8)}"
        return QuotaRequest(
            id_,
            self.tenant,
            limits,
            self.cost,
            LEASE_US,
            self.model,
            shadow=True,
            key=self.key,
            end_user=self.end_user,
        )


class LocalShare:
    """One gateway's part of every limit while the store is down: 1/N of what it last saw remaining.

    A rate refills by 1/N of its amount, also since the last state. Its usage is charged to the store
    afterwards. A limit is overshot by at most what other gateways had used between the last state that this
    gateway saw and the outage, and less than one unit for each gateway, because shares of rates are rounded
    up: a tenant that stays within its limits at each gateway is not refused. A call that fits only the whole
    rate passes when this share is full, and leaves it in debt: each gateway overshoots by at most one call.
    """

    def __init__(self) -> None:
        self._ledger = MemoryLedger(is_share=True)
        # The last state of each limit that the store returned, and when.
        self._states: dict[str, dict[Limit, tuple[LimitState, int]]] = defaultdict(dict)
        self._shares: dict[tuple[str, Limit], Limit] = {}
        self._requests: dict[str, QuotaRequest] = {}
        self._usage: dict[tuple[str, tuple[Limit, ...], str, str, str, EndUser | None], Cost] = {}
        # End users with usage, of each tenant at most as many as are counted by name.
        self._users: dict[str, set[str]] = defaultdict(set)
        self._rate_usage: dict[tuple[str, Limit], int] = defaultdict(int)
        self._numbers = count()

    def record(self, tenant: str, states: Sequence[tuple[Limit, LimitState]], *, is_down: bool) -> None:
        """Store the last known state of a tenant's limits.

        Unless the store is down it counts again, and a share that was created for one missed reserve is
        dropped.
        """
        now_us = time.time_ns() // 1000
        known = self._states[tenant]
        for limit, state in states:
            if limit.is_end_users:
                continue
            known[limit] = (state, now_us)
            if not is_down and (share := self._shares.pop((tenant, limit), None)):
                self._ledger.forget(tenant, share)

    def in_flight_is_scarce(self, request: QuotaRequest) -> bool:
        """Return True if a request may wait for another to end, by the last known state of the limits."""
        for limit in request.limits:
            if limit.period == "in_flight":
                # Nothing is free if the store never returned it.
                (used, *_), _ = self._states[request.tenant].get(limit, ((limit.amount,), 0))
                free = limit.amount - used
                if free < FREE_IN_FLIGHT_MIN or free < limit.amount // 2:
                    return True
        return False

    def has_ample_room(self, request: QuotaRequest) -> bool:
        """Return whether AMPLE_COSTS times the cost, and half of each limit, are left by the last states.

        Other gateways would have to use all of that within AMPLE_US for the request to be refused.
        """
        known, now_us = self._states[request.tenant], time.time_ns() // 1000
        for limit in request.limits:
            state, at_us = known.get(limit, (None, 0))
            if state is None or not 0 <= now_us - at_us <= AMPLE_US:
                return False
            [status] = decode_statuses([limit], [state])
            cost = request.cost.of(limit.unit)
            if status.remaining < max(limit.amount // 2, AMPLE_COSTS * cost):
                return False
        return True

    def reset(self) -> None:
        """Forget the counts of an outage, at its end."""
        self._ledger = MemoryLedger(is_share=True)
        self._shares.clear()

    def refuse_if_spent(self, tenant: str, limits: Sequence[Limit], least: Cost) -> None:
        """Refuse a request that this gateway's share refused last. Raises: QuotaExceeded."""
        shares = [self._shares[tenant, limit] for limit in limits if (tenant, limit) in self._shares]
        self._ledger.refuse_if_spent(tenant, tuple(shares), least)

    async def reserve(self, request: QuotaRequest, gateways: int) -> Reservation:
        """Reserve from this gateway's share. Raises: QuotaExceeded."""
        shares = tuple([await self._share(request.tenant, limit, gateways) for limit in request.limits])
        if not request.shadow:
            for limit, share in zip(request.limits, shares, strict=True):
                if limit.period in ("day", "month") and request.cost.of(limit.unit) > share.amount:
                    raise self._no_share(request, limit, share)
        reservation = await self._ledger.reserve(msgspec.structs.replace(request, limits=shares))
        self._requests[request.id] = request
        return msgspec.structs.replace(reservation, degraded=True)

    def settle(self, reservation: Reservation, actual: Cost, day: str) -> tuple[LimitStatus, ...]:
        """Settle in the local share, and note the usage of that day for the store."""
        request = self._requests.pop(reservation.request.id, None)
        if request is not None:
            limits = [limit for limit in request.limits if not limit.is_end_users]
            calendars = tuple([limit for limit in limits if limit.period in ("day", "month")])
            key = (request.tenant, calendars, request.model, day, request.key, self._counted_user(request))
            used = self._usage.get(key, NOTHING)
            self._usage[key] = msgspec.structs.replace(
                used, **{unit: used.of(unit) + actual.of(unit) for unit in UNITS}
            )
            for limit in limits:
                if limit.period in WINDOWS_US:
                    self._rate_usage[request.tenant, limit] += actual.of(limit.unit)
        return self._ledger.settle(reservation, actual)

    def spent_share(self, tenant: str, limit: Limit) -> float | None:
        """Return the used share of a limit by its last known state, or None if there is none."""
        if limit not in self._states.get(tenant, {}):
            return None
        remaining = self._remaining(tenant, limit)
        return 0.0 if remaining is None else 1 - remaining / limit.amount

    def take_usage(self) -> list[OfflineUsage]:
        """Return and forget the usage to charge to the store."""
        usage, self._usage = self._usage, {}
        self._users.clear()
        rate_usage, self._rate_usage = self._rate_usage, defaultdict(int)
        charges = [
            OfflineUsage(tenant, limits, cost, model, day, key, user)
            for (tenant, limits, model, day, key, user), cost in usage.items()
        ]
        # A rate refills within its window: an older use no longer counts.
        charges += [
            OfflineUsage(tenant, (limit,), _cost_in(limit.unit, min(amount, limit.amount)))
            for (tenant, limit), amount in rate_usage.items()
            if amount
        ]
        return charges

    def _counted_user(self, request: QuotaRequest) -> EndUser | None:
        """Return the end user of a request, or that of all others if too many have usage."""
        user = request.end_user
        if user is None:
            return None
        names = self._users[request.tenant]
        if len(names) < user.most:
            names.add(user.name)
        return user if user.name in names else EndUser(OTHER_USERS, user.most)

    def _no_share(self, request: QuotaRequest, limit: Limit, share: Limit) -> QuotaExceeded:
        """Build the error for a call that a share of a day or month can never admit."""
        remaining, now_us = self._remaining(request.tenant, limit), time.time_ns() // 1000
        if remaining is not None and request.cost.of(limit.unit) > remaining:
            # By the last known state the whole limit has no room for it either.
            left_us = period_end_us(limit.period, now_us) - now_us
            return request.refusal(limit, left_us, [LimitStatus(limit, remaining, left_us)], now_us)
        return QuotaExceeded(
            f"limit {request.text(limit).name}: this gateway may admit {request.text(share).amount} of it, "
            f"and {request.cost_text(limit)}; it may pass when the store is available again",
            unit=limit.unit,
            calendar=False,
            retry_after_s=OUTAGE_RETRY_S,
            headers={},
        )

    async def _share(self, tenant: str, limit: Limit, gateways: int) -> Limit:
        if limit.is_end_users:
            # Its last state is not kept: callers may name any number of end users.
            return _share_of(limit, None, gateways)
        key = (tenant, limit)
        if key not in self._shares:
            remaining = self._remaining(tenant, limit)
            self._shares[key] = share = _share_of(limit, remaining, gateways)
            if limit.period in WINDOWS_US:
                # It starts with its part of what remains. Each gateway has such a part, so that together they
                # admit no more than the store would have, as far as they know its state.
                available = limit.amount if remaining is None else remaining
                used = _cost_in(share.unit, max(0, share.amount - -(-available // gateways)))
                start = QuotaRequest(f"start-{next(self._numbers)}", tenant, (share,), used, LEASE_US)
                self._ledger.settle(await self._ledger.reserve(start), used)
        return self._shares[key]

    def _remaining(self, tenant: str, limit: Limit) -> int | None:
        """Return the remaining amount by the last known state, or None if that is unknown or over.

        A rate has refilled since.
        """
        if limit not in self._states[tenant]:
            return None
        state, at_us = self._states[tenant][limit]
        [status] = decode_statuses([limit], [state])
        left_us = at_us + status.reset_us - time.time_ns() // 1000
        if left_us <= 0:
            return None
        window_us = WINDOWS_US.get(limit.period)
        if window_us is None:
            return status.remaining
        return max(status.remaining, limit.amount - -(-left_us * limit.amount // window_us))


def _cost_in(unit: Unit, amount: int) -> Cost:
    """Return a cost in one unit only."""
    return msgspec.structs.replace(NOTHING, **{unit: amount})


def _share_of(limit: Limit, remaining: int | None, gateways: int) -> Limit:
    if limit.period in ("day", "month"):
        remaining = limit.amount if remaining is None else remaining
        return msgspec.structs.replace(limit, amount=remaining // gateways)
    if limit.period in WINDOWS_US:
        return msgspec.structs.replace(limit, amount=-(-limit.amount // gateways))
    return msgspec.structs.replace(limit, amount=max(1, limit.amount // gateways))
