"""Usage and limits of end users in memory: of a bounded number by name, and of all others together.

The scripts do the same in Redis. Names come from callers, who may state as many as they like.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from gateway.quotas.limits import OTHER_USERS, Limit, LimitStatus, end_user_scope

# Usage by end user is kept for so long: it is personal data. A month can be billed until the end of the next.
USERS_KEPT_DAYS = 62


class EndUser(msgspec.Struct, frozen=True):
    """End user of a tenant.

    name: under which it is counted. most: number of end users of a tenant that are counted by name.
    """

    name: str
    most: int


class EndUserDay:
    """Usage of a tenant's end users on one day. counts: in each unit, by model and name."""

    def __init__(self, counts: Mapping[tuple[str, str], Mapping[str, int]] | None = None) -> None:
        self.counts = {name: dict(units) for name, units in (counts or {}).items()}
        self._names = {name for _, name in self.counts} - {OTHER_USERS}

    def add(self, model: str, user: EndUser, units: Iterable[tuple[str, int]]) -> None:
        """Add the usage of a model."""
        name = user.name
        if name not in self._names:
            if len(self._names) < user.most:
                self._names.add(name)
            else:
                name = OTHER_USERS
        self._add(model, name, units)

    def join(self, counts: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Add what an earlier process has counted."""
        for (model, name), units in counts.items():
            self._add(model, name, units.items())
            self._names |= {name} - {OTHER_USERS}

    def forget(self, names: Collection[str]) -> bool:
        """Count what was recorded of these names as that of others; return whether there was anything."""
        found = [key for key in self.counts if key[1] in names]
        for model, name in found:
            self._add(model, OTHER_USERS, self.counts.pop((model, name)).items())
        self._names.difference_update(names)
        return bool(found)

    def _add(self, model: str, name: str, units: Iterable[tuple[str, int]]) -> None:
        own = self.counts.setdefault((model, name), {})
        for unit, amount in units:
            own[unit] = own.get(unit, 0) + amount


class EndUserLimits:
    """Limits of end users that are counted one by one, of each tenant at most `most` times their kinds.

    A limit that is full again, and of which no reservation is open, is as new: its place is free.
    """

    def __init__(self) -> None:
        # By tenant: the limits, and from when each of them is as new.
        self._idle_us: dict[str, dict[Limit, int]] = {}
        # By tenant: the limits in the order of moments that may be too early by now.
        self._order: dict[str, list[tuple[int, str, Limit]]] = {}

    def counted(
        self, tenant: str, limits: Sequence[Limit], user: EndUser, now_us: int
    ) -> tuple[list[Limit], list[Limit]]:
        """Return the limits that a request of an end user takes from, and those that are as new.

        A limit for which no place is free is replaced by that of all others.
        """
        known, as_new = self._idle_us.get(tenant, {}), self._as_new(tenant, now_us)
        free = user.most * sum(limit.is_end_users for limit in limits) - len(known)
        counted = []
        for limit in limits:
            is_new = limit.is_end_users and limit not in known
            counted.append(limit.for_other_users if is_new and free <= 0 else limit)
            free -= is_new
        return counted, as_new

    def record(self, tenant: str, statuses: Iterable[LimitStatus], expires_us: int, now_us: int) -> None:
        """Record the limits of a reservation. expires_us: of it, from now."""
        for status in statuses:
            if status.limit.is_end_users:
                known = self._idle_us.setdefault(tenant, {})
                idle_us = now_us + max(status.reset_us, expires_us)
                if status.limit not in known:
                    order = self._order.setdefault(tenant, [])
                    heappush(order, (idle_us, status.limit.name, status.limit))
                known[status.limit] = max(idle_us, known.get(status.limit, 0))

    def forget(self, tenant: str, names: Collection[str]) -> list[Limit]:
        """Drop the limits of these end users, and return them."""
        known, scopes = self._idle_us.get(tenant, {}), {end_user_scope(name) for name in names}
        gone = [limit for limit in known if limit.scope in scopes]
        for limit in gone:
            del known[limit]
        order = [each for each in self._order.get(tenant, []) if each[2] in known]
        heapify(order)
        self._order[tenant] = order
        return gone

    def _as_new(self, tenant: str, now_us: int) -> list[Limit]:
        """Drop the limits that are as new, and return them."""
        known, order = self._idle_us.get(tenant, {}), self._order.get(tenant, [])
        gone = []
        while order and order[0][0] <= now_us:
            _, name, limit = heappop(order)
            if known[limit] > now_us:
                heappush(order, (known[limit], name, limit))
            else:
                gone.append(limit)
                del known[limit]
        return gone
