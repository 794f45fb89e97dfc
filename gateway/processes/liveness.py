"""Whether children still answer: one that did and no longer does is killed, and so started again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.processes.child import Child

logger = logging.getLogger("gateway")

# How often in a row. A busy machine, or one long turn of an event loop, is no reason to lose calls.
MISSES_MAX = 4
WORKER_EVERY_S = 4.0
# A worker that has not said anything in a minute will not.
WORKER_GRACE = 11


async def watch(
    child: Child, answers: Callable[[], Awaitable[bool]], every_s: float, grace: int | None = None
) -> None:
    """Ask again and again; runs until cancelled. answers: gives up after every_s at the latest.

    What has not answered yet is still being started: it has so many misses more, or any number. A pause of
    this process itself counts for nothing.
    """
    loop = asyncio.get_running_loop()
    pid: int | None = None
    misses: int | None = None
    while True:
        await asyncio.sleep(every_s)
        if child.pid != pid:
            pid, misses = child.pid, None if grace is None else -grace
        asked_s = loop.time()
        if await answers():
            misses = 0
        elif misses is not None and loop.time() - asked_s < 2 * every_s:
            misses += 1
            if misses >= MISSES_MAX:
                logger.warning("%s answers nothing; ending it", child.name)
                child.kill_hung()
                misses = 0


class Heartbeats:
    """Of a worker's life: whatever it says over its pipe, unasked.

    What it is asked comes to it by way of a thread beside its loop; one that serves calls must not be ended
    because that thread is late.
    """

    def __init__(self) -> None:
        self._heard = False

    def heard(self) -> None:
        """It said something."""
        self._heard = True

    def forget(self) -> None:
        """Its process has ended."""
        self._heard = False

    async def answered(self) -> bool:
        """Whether there was a sign since it was last asked for."""
        heard, self._heard = self._heard, False
        return heard
