"""Fair turns among the connections of one server: calls without a verified key get a bounded part of each."""

import asyncio
from collections import deque
from typing import Protocol

# Calls of connections without a verified key that are begun in one turn of the event loop. Each takes up to a
# millisecond, and the calls of other connections wait for as long.
CALLS_IN_TURN = 8


class Waiter(Protocol):
    """Connection with calls that wait for a turn."""

    def resume(self) -> None:
        """Begin calls, as far as there are turns."""


class Turns:
    """Turns of one server. Needs a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = CALLS_IN_TURN
        self._verified: deque[Waiter] = deque()
        self._unverified: deque[Waiter] = deque()
        self._is_scheduled = False

    def take(self) -> bool:
        """Return whether a call without a verified key may begin in this turn."""
        self._schedule()
        if not self._left:
            return False
        self._left -= 1
        return True

    def wait(self, waiter: Waiter, *, verified: bool) -> None:
        """Resume a connection in a later turn, after those that wait already."""
        (self._verified if verified else self._unverified).append(waiter)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled, self._left = False, CALLS_IN_TURN
        for _ in range(len(self._verified)):
            self._verified.popleft().resume()
        for _ in range(len(self._unverified)):
            if not self._left:
                break
            self._unverified.popleft().resume()
        if self._verified or self._unverified:
            self._schedule()
