"""The audit trail of one process: where it writes its records, and where it reads them.

With Redis the records are there. A change that is made outside of it while Redis does not answer is recorded
in a file of `state_dir`, and copied once Redis answers. Without Redis all records are in a file. Without a
folder they are only in the log.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.audit.file import FILE_NAME, WAITING_NAME, AuditFile
from gateway.audit.query import AuditPage, AuditQuery
from gateway.audit.records import AuditRecord
from gateway.audit.redis_store import AuditInRedis
from gateway.config.schema import AuditSettings
from gateway.events import AuditRecorded
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient

logger = logging.getLogger("gateway")

# Time between two looks at the file that waits for Redis.
COPY_EVERY_S = 2.0
COPIED_TOGETHER = 100


class NoTrail(Exception):
    """There is no place for records; the message says what would make one."""


class AuditTrail:
    """Audit trail of one process. Only the records of changes outside of a store's transaction pass it.

    redis: of the gateway; None if it has none, or records are only read from its file. folder: `state_dir`,
    None if none is known. observe: logs the records.
    """

    def __init__(
        self,
        redis: RedisClient | None,
        folder: Path | None,
        settings: AuditSettings,
        observe: Callable[[AuditRecorded], None],
    ) -> None:
        self._redis = redis
        self._shared = None if redis is None else AuditInRedis(redis, settings)
        name = FILE_NAME if redis is None else WAITING_NAME
        self._file = None if folder is None else AuditFile(folder / name, settings)
        self._observe = observe

    async def record(self, record: AuditRecord) -> None:
        """Record and log a change that was made. It is never an error of the change."""
        self._observe(record.event())
        if self._shared is not None:
            try:
                await self._shared.append([record])
            except StoreUnavailable:
                # It may have arrived: a copy with the same id is the same record.
                pass
            else:
                return
        if self._file is not None:
            try:
                await asyncio.to_thread(self._file.append, [record])
            except OSError as error:
                logger.error("%s cannot be written: %s", self._file.path, error.strerror)  # noqa: TRY400

    async def page(self, query: AuditQuery) -> AuditPage:
        """Return a page of records. Raises: InvalidCursor, NoTrail, StoreUnavailable."""
        if self._shared is not None:
            await self.copy()
            return await self._shared.page(query)
        if self._file is None:
            raise NoTrail("records of changes are kept in Redis, or in `state_dir`; neither is known")
        try:
            return await asyncio.to_thread(self._file.page, query)
        except OSError as error:
            raise StoreUnavailable(f"{self._file.path} cannot be read: {error.strerror}") from error

    async def copy(self) -> None:
        """Copy the records that wait for Redis. Raises: StoreUnavailable."""
        if self._shared is None or self._file is None or not self._file.path.exists():
            return
        try:
            waiting = await asyncio.to_thread(self._file.records)
            for start in range(0, len(waiting), COPIED_TOGETHER):
                await self._shared.append(waiting[start : start + COPIED_TOGETHER])
            await asyncio.to_thread(self._file.remove, waiting)
        except OSError as error:
            logger.error("%s cannot be copied into Redis: %s", self._file.path, error.strerror)  # noqa: TRY400
            return
        logger.info("copied %d records of changes into Redis", len(waiting))

    async def run(self) -> None:
        """Copy records that wait for Redis, until cancelled."""
        while True:
            with suppress(StoreUnavailable):
                await self.copy()
            await asyncio.sleep(COPY_EVERY_S)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._redis is not None:
            await self._redis.aclose()
