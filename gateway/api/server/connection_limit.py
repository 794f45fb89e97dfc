"""Bound on the connections of one worker, and the share of it that the calls of one tenant may take.

docs/decisions/092-connections-have-shares.md has the reasons.
"""

import asyncio
import logging
import math
import resource
from collections import Counter
from collections.abc import Collection
from typing import Literal, Protocol, TypeAlias

logger = logging.getLogger("gateway")

# Part of the connections that make room at once, so that a flood does not search all of them each time.
BATCH_DIVISOR = 32
LOG_INTERVAL_S = 10.0
# Connections over the bound on which only probes are answered, while calls take all others.
PROBES_MAX = 16
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

    def make_room(self) -> None:
        """Close the connection."""


Admission: TypeAlias = Literal["open", "for_probes", "refused"]


class ConnectionLimit:
    """Most connections of one server.

    Rules: no client that owes bytes can keep another one out, no tenant can keep another one out by its
    calls, and a probe always gets a connection.
    """

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._logged_s = -math.inf
        self._calls = 0
        self._calls_by_tenant: Counter[str] = Counter()

    def claim(self, tenant: str) -> bool:
        """Take a connection for a call of a tenant, if its share has one more."""
        free = self._connections_max - self._calls - 1
        # A bound of one connection has no share to divide.
        if self._calls and self._calls_by_tenant[tenant] + 1 > SHARE_OF_FREE * free:
            return False
        self._calls += 1
        self._calls_by_tenant[tenant] += 1
        return True

    def release(self, tenant: str) -> None:
        """Return the connection of a call that has been answered."""
        self._calls -= 1
        self._calls_by_tenant[tenant] -= 1
        if not self._calls_by_tenant[tenant]:
            del self._calls_by_tenant[tenant]

    def admit(self, newcomer: Connection, connections: Collection[Connection]) -> Admission:
        """Return what a new connection may be used for; over the bound, others are closed for it.

        The owner of the most connections makes room first. connections: all open ones, with the new one.
        """
        if len(connections) <= self._connections_max:
            return "open"
        counts = Counter([connection.owner for connection in connections])
        waiting = [
            ((-counts[connection.owner], rank), connection)
            for connection in connections
            if connection is not newcomer and (rank := connection.waiting_rank()) is not None
        ]
        waiting.sort(key=lambda pair: pair[0])
        ordinary = [connection for _, connection in waiting if not connection.for_probes]
        for connection in ordinary[: self._connections_max // BATCH_DIVISOR + 1]:
            connection.make_room()
        self._log("closed waiting connections" if ordinary else "refused connections")
        if ordinary:
            return "open"
        if len(connections) > self._connections_max + PROBES_MAX:
            if not waiting:
                return "refused"
            waiting[0][1].make_room()
        return "for_probes"

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
