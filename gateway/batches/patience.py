"""Repetition of an action on a disk, a bucket or a store until it can take it."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.batches.job_store import JobStoreUnavailable
from gateway.batches.objects import FULL, ObjectsUnavailable
from gateway.errors import QuotaUnavailable

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 15.0
TRANSIENT = FULL | {errno.EIO, errno.EAGAIN, errno.ENFILE, errno.EMFILE}
Result = TypeVar("Result")


class Stopped(Exception):
    """The process stops; another attempt goes on with the work."""


class Postponed(Exception):
    """A chunk cannot go on now; another attempt follows. after_s: how soon."""

    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__()
        self.after_s = after_s


async def until_stored(
    store: Callable[[], Awaitable[Result]], stopping: asyncio.Event, on_wait: Callable[[str, float], object]
) -> Result:
    """Return the result of an action, repeated while it fails for reasons that may pass.

    on_wait: takes the reason of each failure, and the time until the next try. Raises: Stopped, OSError for a
    failure that does not pass.
    """
    pause_s = PAUSE_MIN_S
    while True:
        try:
            return await store()
        except (ObjectsUnavailable, JobStoreUnavailable, QuotaUnavailable) as error:
            reason = f"results cannot be stored: {error}"
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            reason = f"results cannot be stored: {error.strerror}"
        if stopping.is_set():
            raise Stopped
        on_wait(reason, pause_s)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the tries
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)
