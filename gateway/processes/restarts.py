"""Counts of process restarts, which the parent keeps and sends to every worker.

Any worker can therefore report the counts of all processes, including a worker that has just been started.
"""

import time
from collections.abc import Callable
from typing import get_args

from gateway.events import EndReason, ProcessRestarted


class Restarts:
    """Restart counts by process and reason. broadcast: sends an update to every running worker."""

    def __init__(self, broadcast: Callable[[ProcessRestarted], None]) -> None:
        self._broadcast = broadcast
        self._latest: dict[tuple[str, EndReason], ProcessRestarted] = {}

    def register(self, process: str) -> None:
        """Start counting a process at zero: a counter that first appears at 1 hides that first restart."""
        for reason in get_args(EndReason):
            self._latest.setdefault((process, reason), ProcessRestarted(process, reason))

    def record(self, process: str, reason: EndReason, how: str) -> None:
        """Count one exit and broadcast it. how: the signal or exit status."""
        self.register(process)
        times = self._latest[process, reason].times + 1
        restart = ProcessRestarted(process, reason, how, times, time.time())
        self._latest[process, reason] = restart
        self._broadcast(restart)

    @property
    def latest(self) -> tuple[ProcessRestarted, ...]:
        """The last update of each process and reason, for a worker that is being started."""
        return tuple(self._latest.values())
