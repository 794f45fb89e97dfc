"""Records for status page and console: recent changes, traffic of the last hour, and the last calls."""

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gateway.events import AttemptFinished, CallFinished, Observers
from gateway.telemetry.change_history import CHANGES, ChangeHistory
from gateway.telemetry.recent_calls import RecentCalls
from gateway.telemetry.totals import Totals
from gateway.telemetry.traffic_history import FILE_NAME, TrafficHistory


class Records:
    """Records of one worker, which include those of the others. worker: None for a single one."""

    def __init__(self, worker: int | None) -> None:
        self._worker = worker
        self.changes = ChangeHistory()
        # The folder in which the workers share their metrics.
        folder = None if worker is None else Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        self.traffic = TrafficHistory(None if folder is None else folder / FILE_NAME)
        self.calls = RecentCalls(folder, worker or 0)

    def join(self, observers: Observers) -> None:
        """Record the events that are of interest from now on."""
        observers.add(self.calls.observe, CallFinished)
        observers.add(self.changes.observe_attempt, AttemptFinished)
        observers.add(self.changes.observe, *CHANGES)

    def tasks(self, read: Callable[[], Totals]) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks. read: returns the totals of all workers, which one of them samples."""
        tasks = [] if self._worker is None else [self.calls.write_forever()]
        if not self._worker:
            tasks.append(self.traffic.record_forever(read))
        return tasks
