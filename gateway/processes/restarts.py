"""How often processes of this gateway have been started again; the parent counts, and tells every worker.

So each worker can answer for all, also one that has just been started itself.
"""

import time
from collections.abc import Callable
from typing import get_args

from gateway.events import EndReason, ProcessRestarted


class Restarts:
    """tell: hands one to every worker that runs."""

    def __init__(self, tell: Callable[[ProcessRestarted], None]) -> None:
        self._tell = tell
        self._latest: dict[tuple[str, EndReason], ProcessRestarted] = {}

    def expect(self, process: str) -> None:
        """One that may end: a counter that begins with its first count tells nobody of that one."""
        for reason in get_args(EndReason):
            self._latest.setdefault((process, reason), ProcessRestarted(process, reason))

    def ended(self, process: str, reason: EndReason, how: str) -> None:
        """It has, unasked, and is started again."""
        self.expect(process)
        before = self._latest[process, reason]
        now = ProcessRestarted(process, reason, how, before.times + 1, time.time())
        self._latest[process, reason] = now
        self._tell(now)

    @property
    def told(self) -> tuple[ProcessRestarted, ...]:
        """What a worker that is started now has not heard; the last of each kind."""
        return tuple(self._latest.values())
