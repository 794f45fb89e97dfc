"""Repetition of an action on a disk, a bucket or a store until it can take it."""

import asyncio
import errno
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.batches.job_store import JobStoreUnavailable, StorageFull
from gateway.batches.objects import FULL, ObjectsUnavailable
from gateway.errors import QuotaUnavailable

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 15.0
TRANSIENT = FULL | {errno.EIO, errno.EAGAIN, errno.ENFILE, errno.EMFILE}
Result = TypeVar("Result")

logger = logging.getLogger("gateway")


class Stopped(Exception):
    """The process stops; another attempt goes on with the work."""


class Postponed(Exception):
    """A chunk cannot go on now; another attempt follows. after_s: how soon."""

    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__()
        self.after_s = after_s


async def until_stored(
    store: Callable[[], Awaitable[Result]], stopping: asyncio.Event, subject: str
) -> Result:
    """Return the result of an action, repeated while it fails for reasons that may pass.

    subject: of the log line. Raises: Stopped, OSError for a failure that does not pass.
    """
    pause_s = PAUSE_MIN_S
    while True:
        try:
            return await store()
        except (ObjectsUnavailable, JobStoreUnavailable, StorageFull, QuotaUnavailable) as error:
            reason = str(error) or "the storage is full"
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            reason = error.strerror or "the disk failed"
        if stopping.is_set():
            raise Stopped
        if pause_s == PAUSE_MIN_S:
            logger.warning("%s waits: %s", subject, reason)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the tries
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)
