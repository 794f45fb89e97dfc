"""Bound on the connections of one worker, and the share of it that the calls of one tenant may take.

docs/decisions/092-connections-have-shares.md has the reasons.
"""

import asyncio
import logging
import math
import resource
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, Protocol, TypeAlias

logger = logging.getLogger("gateway")

# Part of the connections that make room at once, so that a flood does not search all of them each time.
BATCH_DIVISOR = 32
LOG_INTERVAL_S = 10.0
# Connections over the bound on which only probes are answered, while calls take all others.
PROBES_MAX = 16
# Part of the bound by which connections that are too new to have been read may exceed it: otherwise they
# close each other when many come at once.
NEW_DIVISOR = 4
NEW_S = 0.25
# Calls of one tenant take at most so many times the connections that stay free, as bodies do of the memory.
SHARE_OF_FREE = 3
# Files other than callers' connections: those to replicas, engines and Redis.
FILES_PER_CONNECTION = 2


class Connection(Protocol):
    """Connection as far as the bound needs it.

    owner: its client's address, or the tenant of its latest call. for_probes: only probes are answered on it.
    """

    owner: str
    for_probes: bool

    def waiting_rank(self) -> tuple[int, float] | None:
        """Return the place in the order of making room, lowest first; None while a request is served."""

    def is_new(self) -> bool:
        """Return whether it has had no time yet to send a request."""

    def make_room(self) -> None:
        """Close the connection."""


Admission: TypeAlias = Literal["open", "for_probes", "refused"]


class TenantShares:
    """Calls of tenants among a number of places. Rule: no tenant can keep another one out by its calls.

    One tenant takes at most three times as many as stay free, as bodies do of the memory. taken: by all.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._by_tenant: Counter[str] = Counter()
        self.taken = 0

    def claim(self, tenant: str) -> bool:
        """Take a place for a call of a tenant, if its share has one more."""
        free = self._places - self.taken - 1
        # A bound of one place has no share to divide.
        if self.taken and self._by_tenant[tenant] + 1 > SHARE_OF_FREE * free:
            return False
        self.taken += 1
        self._by_tenant[tenant] += 1
        return True

    def release(self, tenant: str) -> None:
        """Return the place of a call that has been answered."""
        self.taken -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def of(self, tenant: str) -> int:
        """Return the places that a tenant has."""
        return self._by_tenant[tenant]


class ConnectionLimit(TenantShares):
    """Most connections of one server, which calls take as places.

    Rules: no client that owes bytes can keep another one out, and a probe always gets a connection.
    """

    def __init__(self, connections_max: int, new_max: int | None = None) -> None:
        super().__init__(connections_max)
        self._connections_max = connections_max
        self._new_max = connections_max // NEW_DIVISOR if new_max is None else new_max
        self._logged_s = -math.inf

    def admit(self, newcomer: Connection, connections: Collection[Connection]) -> Admission:
        """Return what a new connection may be used for; over the bound, others are closed for it.

        The owner of the most connections makes room first. connections: all open ones, with the new one.
        """
        if len(connections) <= self._connections_max:
            return "open"
        counts = Counter([connection.owner for connection in connections])
        ranked = [
            ((-counts[connection.owner], rank), connection)
            for connection in connections
            if connection is not newcomer and (rank := connection.waiting_rank()) is not None
        ]
        ranked.sort(key=lambda pair: pair[0])
        waiting = [connection for _, connection in ranked]
        ordinary = [connection for connection in waiting if not connection.for_probes]
        is_slight = len(connections) <= self._connections_max + self._new_max
        # Requests that are no calls end soon; also those that are about to become calls or to be refused.
        passing = len(connections) - 1 - len(waiting) - self.taken
        if ordinary:
            if not (is_slight and passing > len(waiting)):
                self._make_room(ordinary, spares_new=is_slight)
            return "open"
        self._log("refused connections")
        if len(connections) > self._connections_max + PROBES_MAX:
            if not waiting:
                return "refused"
            waiting[0].make_room()
        return "for_probes"

    def _make_room(self, waiting: Sequence[Connection], *, spares_new: bool) -> None:
        """Close the first connections, all of one owner: those of others may be about to send a request."""
        owner = waiting[0].owner
        rivals = [each for each in waiting if each.owner == owner and not (spares_new and each.is_new())]
        for connection in rivals[: self._connections_max // BATCH_DIVISOR + 1]:
            connection.make_room()
        if rivals:
            self._log("closed waiting connections")

    def _log(self, done: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s + LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning("%s: there are more than %d", done, self._connections_max)


def connections_within_files(connections_max: int, files_per_connection: int = FILES_PER_CONNECTION) -> int:
    """Raise the soft limit of open files as far as needed, and return the connections that it allows.

    files_per_connection: limit of open files for each of them, those of other listeners included.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections_max * files_per_connection
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = min(connections_max, soft // files_per_connection)
    if allowed < connections_max:
        logger.warning("at most %d connections: this process may open only %d files", allowed, soft)
    return allowed
