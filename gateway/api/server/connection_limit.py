"""Bound on the connections of one worker: over it, those that wait for their clients make room."""

import asyncio
import logging
import math
import resource
from collections.abc import Collection
from operator import itemgetter
from typing import Protocol

logger = logging.getLogger("gateway")

# Part of the connections that make room at once, so that a flood does not search all of them each time.
BATCH_DIVISOR = 32
LOG_INTERVAL_S = 10.0
# Files other than callers' connections: those to replicas, engines and Redis.
FILES_PER_CONNECTION = 2


class Connection(Protocol):
    """Connection as far as the bound needs it."""

    def waiting_rank(self) -> tuple[int, float] | None:
        """Return the place in the order of making room, lowest first; None while a request is served."""

    def make_room(self) -> None:
        """Close the connection."""


class ConnectionLimit:
    """Most connections of one server. Rule: no client that owes bytes can keep another one out."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._logged_s = -math.inf

    def admit(self, newcomer: Connection, connections: Collection[Connection]) -> bool:
        """Return whether a new connection may stay; over the bound, others are closed for it.

        connections: all open ones, with the new one.
        """
        if len(connections) <= self._connections_max:
            return True
        waiting = [
            (rank, connection)
            for connection in connections
            if connection is not newcomer and (rank := connection.waiting_rank()) is not None
        ]
        waiting.sort(key=itemgetter(0))
        for _, connection in waiting[: self._connections_max // BATCH_DIVISOR + 1]:
            connection.make_room()
        self._log("closed waiting connections" if waiting else "refused a connection")
        return bool(waiting)

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
