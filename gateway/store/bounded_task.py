"""A task with a timeout that does not cancel it and ignores stalls of the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.store.errors import StoreUnavailable, unavailable

# A timer that fires this many timeouts after its start shows that the event loop was stalled.
LATE_TIMER = 1.5
# Turns of the event loop that a reply needs to be read once it has arrived.
TURNS_TO_READ = 2


class BoundedTask:
    """Work on the store with a timeout. It calls on_result once, with the result or a StoreUnavailable.

    The timeout does not cancel the task: it may be opening the connection that the next batch needs.
    """

    def __init__(
        self, work: Coroutine[Any, Any, Any], timeout_s: float, on_result: Callable[[Any], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] = loop.create_task(work)
        self._timeout_s = timeout_s
        self._on_result: Callable[[Any], None] | None = on_result
        self._due_s = loop.time() + timeout_s
        self._timer = loop.call_later(timeout_s, self._on_timer)
        self.task.add_done_callback(self._on_done)

    def detach(self) -> None:
        """Stop the timer and drop the callback; the task itself goes on."""
        self._on_result = None
        self._timer.cancel()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._report(StoreUnavailable("the connection was closed"))
        elif (error := task.exception()) is not None:
            self._report(unavailable(error))
        else:
            self._report(task.result())

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        late_s, self._due_s = loop.time() - self._due_s, loop.time() + self._timeout_s
        if late_s > self._timeout_s * (LATE_TIMER - 1):
            # The event loop was stalled: the silence is not the store's.
            self._timer = loop.call_later(self._timeout_s, self._on_timer)
        else:
            self._time_out_after(TURNS_TO_READ)

    def _time_out_after(self, turns: int) -> None:
        """Time out some turns later: a busy loop may not have read a reply that has arrived."""
        if turns:
            asyncio.get_running_loop().call_soon(self._time_out_after, turns - 1)
        else:
            self._report(StoreUnavailable(f"no answer within {self._timeout_s * 1000:.0f} ms"))

    def _report(self, result: Any) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            self._timer.cancel()
            on_result(result)
