"""Replies that take long to make: each is made once, in a turn, and is kept for some seconds.

Each asker has one place in a queue, so that its reads make only itself wait. A reply whose making has begun
is completed even if its readers have left or timed out meanwhile: the next reader gets it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from gateway.errors import Overloaded

# A reader waits for so long, and the making of a reply that has begun may take longer.
READ_S = 20.0
MAKE_S = 120.0
# Replies of one asker that wait or are made, and askers in one queue.
WAITING_MAX = 8
ASKERS_MAX = 64
REPLIES_MAX = 64

Reply = TypeVar("Reply")


class _Place:
    """Place of one asker in a queue. replies: that wait or are made."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.replies = 0


class _Queue:
    """Queue of askers, the first of which has its reply made."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.places: dict[str, _Place] = {}


class _Making:
    """Reply that waits for its turn, or is made. readers: that wait for it."""

    def __init__(self) -> None:
        self.readers = 0
        self.has_begun = False
        self.task: asyncio.Task[Any] | None = None


class ReplyCache:
    """Replies of the last seconds, and those that are being made.

    subject: of the replies, for errors. clock: monotonic.
    """

    def __init__(self, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._subject = subject
        self._clock = clock
        self._replies: dict[Hashable, tuple[float, Any]] = {}
        self._queues: dict[str, _Queue] = {}
        self._making: dict[Hashable, _Making] = {}

    async def reply(
        self,
        key: Hashable,
        kept_s: float,
        make: Callable[[], Awaitable[Reply]],
        *,
        queue: str = "",
        asker: str = "",
    ) -> Reply:
        """Return a reply that was made a moment ago, or make it.

        queue: replies of different queues do not wait for each other. asker: has one place in the queue.
        Raises: Overloaded, and the errors of `make`.
        """
        until_s, found = self._replies.get(key, (0.0, None))
        if self._clock() < until_s:
            return found  # type: ignore[no-any-return]
        if (making := self._making.get(key)) is None:
            making = self._begin(key, kept_s, make, self._queues.setdefault(queue, _Queue()), asker)
        task = making.task
        assert task is not None
        making.readers += 1
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.shield(task)
        except TimeoutError as error:
            message = f"{self._subject} could not be read in time; try again"
            raise Overloaded(message, retry_after_s=5) from error
        finally:
            making.readers -= 1
            if not making.readers and not making.has_begun:
                task.cancel()
                # A reader that comes before its end makes the reply itself.
                self._making.pop(key, None)

    def _begin(
        self, key: Hashable, kept_s: float, make: Callable[[], Awaitable[Any]], queue: _Queue, asker: str
    ) -> _Making:
        """Enqueue the making of a reply. Raises: Overloaded."""
        place = queue.places.get(asker)
        if (len(queue.places) >= ASKERS_MAX) if place is None else (place.replies >= WAITING_MAX):
            raise Overloaded(f"too many requests for {self._subject} wait; try again", retry_after_s=2)
        if place is None:
            place = queue.places[asker] = _Place()
        place.replies += 1
        making = self._making[key] = _Making()

        async def run() -> Any:
            async with place.lock, queue.lock:
                making.has_begun = True
                async with asyncio.timeout(MAKE_S):
                    made = await make()
                self._keep(key, kept_s, made)
                return made

        def end(task: "asyncio.Task[Any]") -> None:
            if self._making.get(key) is making:
                del self._making[key]
            place.replies -= 1
            if not place.replies:
                del queue.places[asker]
            if not task.cancelled():
                # Its readers may have left: an error is theirs, and is not reported otherwise.
                task.exception()

        making.task = asyncio.create_task(run())
        making.task.add_done_callback(end)
        return making

    def _keep(self, key: Hashable, kept_s: float, made: Any) -> None:
        self._replies.pop(key, None)
        while len(self._replies) >= REPLIES_MAX:
            del self._replies[next(iter(self._replies))]
        self._replies[key] = self._clock() + kept_s, made
