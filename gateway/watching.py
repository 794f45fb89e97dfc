"""Whether children still answer: one that did and no longer does is killed, and so started again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec

from gateway import pipes
from gateway.child import Child

logger = logging.getLogger("gateway")

# How often in a row. A busy machine, or one long turn of an event loop, is no reason to lose calls.
MISSES_MAX = 4
WORKER_EVERY_S = 2.0


async def watch(child: Child, answers: Callable[[], Awaitable[bool]], every_s: float) -> None:
    """Ask again and again; runs until cancelled. answers: gives up after every_s at the latest.

    What has not answered yet is still being started. A pause of this process itself counts for nothing.
    """
    loop = asyncio.get_running_loop()
    pid: int | None = None
    misses: int | None = None
    while True:
        await asyncio.sleep(every_s)
        if child.pid != pid:
            pid, misses = child.pid, None
        asked_s = loop.time()
        if await answers():
            misses = 0
        elif misses is not None and loop.time() - asked_s < 2 * every_s:
            misses += 1
            if misses >= MISSES_MAX:
                logger.warning("%s answers nothing; ending it", child.name)
                child.kill_hung()
                misses = 0


class Pings:
    """Whether a worker's event loop still turns. send: one line to it; False where there is no process."""

    def __init__(self, send: Callable[[bytes], bool], timeout_s: float = WORKER_EVERY_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._is_ready = False

    async def answered(self) -> bool:
        """Ask once, and wait."""
        if self._is_ready:
            self._is_ready = False
            return True
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(msgspec.json.encode(pipes.Ping(number))):
                return False
            async with asyncio.timeout(self._timeout_s):
                await answer
        except TimeoutError:
            return False
        finally:
            del self._waiting[number]
        return True

    def heard_ready(self) -> None:
        """It says so by itself, before anybody has asked."""
        self._is_ready = True

    def heard(self, number: int) -> None:
        """An answer; one that comes too late is none."""
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(None)
