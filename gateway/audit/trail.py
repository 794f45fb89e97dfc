"""The audit trail of one process: where it writes its records, and where it reads them.

With Redis the records are there. A change that is made outside of it while Redis does not answer is recorded
in a file of `state_dir`, and copied once Redis answers. Without Redis all records are in a file. Without a
folder they are only in the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.audit.file import FILE_NAME, WAITING_NAME, AuditFile
from gateway.audit.query import PAGE_MAX, AuditPage, AuditQuery
from gateway.audit.records import AuditRecord, time_text
from gateway.audit.redis_store import AuditInRedis
from gateway.config.schema import AuditSettings
from gateway.events import AuditRecorded
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient

logger = logging.getLogger("gateway")

# Time between two looks at the records that wait for Redis, and at those of commands.
LOOK_EVERY_S = 2.0
CLOCKS_DIFFER_S = 60.0
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
        # The file when the records of commands were last read.
        self._seen = (0, 0)

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
        if waiting:
            logger.info("copied %d records of changes into Redis", len(waiting))

    async def run(self) -> None:
        """Copy records that wait for Redis, and log those of commands, until cancelled."""
        known = {record.id for record in await self._commands() or ()}
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(StoreUnavailable):
                await self.copy()
            if (latest := await self._commands()) is None:
                continue
            for record in latest:
                if record.id not in known:
                    self._observe(record.event())
            known = {record.id for record in latest}

    async def _commands(self) -> list[AuditRecord] | None:
        """Return the latest records of commands, which have no log of their own, the oldest first.

        None if they are those of the last time, or are not known.
        """
        # The clock of a command's host may differ from this one's.
        query = AuditQuery(since=time_text(time.time() - CLOCKS_DIFFER_S), limit=PAGE_MAX)
        try:
            if self._shared is not None:
                page = await self._shared.page(query)
            elif self._file is not None and (place := _place_of(self._file.path)) != self._seen:
                self._seen = place
                page = await asyncio.to_thread(self._file.page, query)
            else:
                return None
        except (OSError, StoreUnavailable):
            return None
        return [record for record in reversed(page.data) if record.actor_kind == "command"]

    async def aclose(self) -> None:
        """Close the connections."""
        if self._redis is not None:
            await self._redis.aclose()


def _place_of(path: Path) -> tuple[int, int]:
    """Return what changes with each record in a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size
