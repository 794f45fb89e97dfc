"""Liveness checks, which kill a child process that has stopped responding so that it is restarted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.processes.child import Child

logger = logging.getLogger("gateway")

# Missed checks in a row before the kill. A busy machine, or one long turn of an event loop, must not cost
# requests.
MISSES_MAX = 4
WORKER_CHECK_EVERY_S = 4.0
# Additional misses for a worker that is still starting: one that is silent for a minute will stay silent.
WORKER_START_MISSES = 11


async def watch_liveness(
    child: Child, is_alive: Callable[[], Awaitable[bool]], every_s: float, start_misses: int | None = None
) -> None:
    """Check a child periodically, and kill it after too many misses in a row; runs until cancelled.

    is_alive: gives up after every_s at the latest. start_misses: additional misses for a child that has not
    responded yet, because it is still starting; None for any number. A check during which this process itself
    was paused does not count.
    """
    loop = asyncio.get_running_loop()
    pid: int | None = None
    misses: int | None = None
    while True:
        await asyncio.sleep(every_s)
        if child.pid != pid:
            pid, misses = child.pid, None if start_misses is None else -start_misses
        checked_s = loop.time()
        if await is_alive():
            misses = 0
        elif misses is not None and loop.time() - checked_s < 2 * every_s:
            misses += 1
            if misses >= MISSES_MAX:
                logger.warning("%s does not respond; killing it", child.name)
                child.kill_hung()
                misses = 0


class Heartbeats:
    """Sign of life of a worker: any message that it has sent since the last check.

    The worker sends them unasked. A request from here would reach it through a thread next to its event loop,
    and a worker that serves requests must not be killed because that thread is late.
    """

    def __init__(self) -> None:
        self._received = False

    def record(self) -> None:
        """Note that the worker has sent a message."""
        self._received = True

    def reset(self) -> None:
        """Forget the messages of a process that has exited."""
        self._received = False

    async def is_alive(self) -> bool:
        """Return True if a message has arrived since the last check."""
        received, self._received = self._received, False
        return received
