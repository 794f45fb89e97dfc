"""Opening of files that can take long, such as a tokenizer from the Hub, without delaying anything else."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Generic, TypeVar

from backends.contract.errors import ModelUnavailable

T = TypeVar("T")

# Callers wait no longer than this; the opening continues, and later callers find its result.
OPEN_TIMEOUT_S = 30.0
# Time until a failed opening is tried again.
RETRY_S = 30.0


class BackgroundOpener(Generic[T]):
    """A resource that a thread of its own opens at the first use."""

    def __init__(self) -> None:
        self.resource: T | None = None
        self._opening: asyncio.Future[ModelUnavailable | None] | None = None
        self._started_s = 0.0
        self._failed_s = 0.0

    async def get(self, open_resource: Callable[[], T]) -> T:
        """Return the resource, opened if necessary.

        open_resource: runs in a thread, and raises ModelUnavailable.

        Raises: ModelUnavailable, if it cannot be opened, or not in time.
        """
        now_s = asyncio.get_running_loop().time()
        if self._opening is None or (
            self.resource is None and self._opening.done() and now_s >= self._failed_s + RETRY_S
        ):
            self._opening, self._started_s = self._start(open_resource), now_s
        # Not cancelled with its caller: other callers wait for the same opening.
        await asyncio.wait([self._opening], timeout=max(0.0, self._started_s + OPEN_TIMEOUT_S - now_s))
        if not self._opening.done():
            raise ModelUnavailable(f"it was not opened within {OPEN_TIMEOUT_S:.0f} s")
        error = self._opening.result()
        if error is not None:
            raise error.with_traceback(None)
        assert self.resource is not None
        return self.resource

    def _start(self, open_resource: Callable[[], T]) -> "asyncio.Future[ModelUnavailable | None]":
        loop = asyncio.get_running_loop()
        opening: asyncio.Future[ModelUnavailable | None] = loop.create_future()

        def finish(resource: T | None, error: ModelUnavailable | None) -> None:
            self.resource, self._failed_s = resource, loop.time()
            opening.set_result(error)

        def run() -> None:
            resource: Any = None
            error: ModelUnavailable | None = None
            try:
                resource = open_resource()
            except ModelUnavailable as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - callers wait for a result of some kind
                error = ModelUnavailable(f"it cannot be opened: {type(failure).__name__}")
            # A loop that has closed waits for nothing.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, resource, error)

        # A daemon, because a process that stops must not wait for the Hub.
        Thread(target=run, name="open", daemon=True).start()
        return opening
