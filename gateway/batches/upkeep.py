"""Upkeep of files and jobs: what was lost is built again from the objects, what has expired is removed."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.batches import names
from gateway.batches.files import Files
from gateway.batches.job_store import (
    JobStoreUnavailable,
    Kind,
    Page,
    Row,
    file_of,
    file_row,
    job_of,
    job_row,
)
from gateway.batches.lifecycle import Lifecycle
from gateway.batches.objects import ObjectsUnavailable
from gateway.batches.records import FileRecord, FinalRecord, Job
from gateway.batches.service import Readiness

LOOK_EVERY_S = 3.0
SWEEP_EVERY_S = 600.0
# An upload that has not grown for so long belongs to a gateway that was killed.
UNFINISHED_S = 6 * 3600.0
ROWS_AT_ONCE = 200
# Longer than any job runs.
JOURNALS_KEEP_S = 2 * 24 * 3600.0
# Looks at a job before its missing chunks are put into the queue again.
PATIENCE = 5

logger = logging.getLogger("gateway")


class OtherObjects(Exception):
    """The gateways of one Redis use different folders or buckets."""


class Upkeep:
    """Upkeep by one process; every step may be taken by several at once. folder: of the journals."""

    def __init__(self, files: Files, lifecycle: Lifecycle, folder: Path, readiness: Readiness) -> None:
        self._files = files
        self._readiness = readiness
        self._lifecycle = lifecycle
        self._table = lifecycle.table
        self._folder = folder
        self._beat = 0
        self._is_built = False
        self._swept_s = 0.0
        self._stalled: dict[str, tuple[int, int]] = {}
        self._active_jobs = 0
        self._used_bytes = 0

    def state(self) -> tuple[int, int]:
        """Return the number of active jobs and the bytes of all files, as they were last seen."""
        return self._active_jobs, self._used_bytes

    async def run(self) -> None:
        """Take steps until cancelled."""
        while True:
            try:
                await self.step()
                self._readiness.problem = None
                self._readiness.ready.set()
            except OtherObjects:
                message = (
                    "this gateway has another `batches.dir` or bucket than the other gateways of its Redis"
                )
                if self._readiness.problem != message:
                    logger.error("batches are off: %s", message)  # noqa: TRY400 - the cause is the message
                self._readiness.problem = message
            except (JobStoreUnavailable, ObjectsUnavailable) as error:
                logger.warning("batches wait: %s", error)
                if not self._is_built:
                    self._readiness.problem = f"files and batches are unavailable: {error}"
            except Exception:
                # Upkeep must go on: a job would never end.
                logger.exception("the upkeep of batches failed")
            await asyncio.sleep(LOOK_EVERY_S)

    async def step(self) -> None:
        """Look once. Raises: OtherObjects, JobStoreUnavailable, ObjectsUnavailable."""
        beat = await self._table.beat()
        if not self._is_built or beat <= self._beat:
            await self._check_identity()
            await self.rebuild()
            self._is_built = True
        self._beat = beat
        await self._look_at_jobs()
        now_s = time.monotonic()
        if not self._swept_s or now_s - self._swept_s > SWEEP_EVERY_S:
            self._swept_s = now_s
            await self.sweep()

    async def _check_identity(self) -> None:
        objects = self._files.objects
        await objects.create(names.IDENTITY, msgspec.json.encode(secrets.token_hex(16)))
        identity = await objects.read(names.IDENTITY)
        if identity is None or await self._table.agree(identity.decode()) != identity.decode():
            raise OtherObjects

    async def rebuild(self) -> None:
        """Add the rows that are missing. Raises: JobStoreUnavailable, ObjectsUnavailable."""
        table, objects = self._table, self._files.objects
        for name in await objects.names(names.FILES):
            id_, _, kind = name.removeprefix(names.FILES).partition(".")
            if kind == "json" and await table.get(id_) is None:
                found = await objects.read(name)
                if found is not None:
                    await table.put(file_row(msgspec.json.decode(found, type=FileRecord)))
        # Only the folders: the objects of all jobs may be millions.
        for id_ in await objects.folders(names.JOBS):
            if await table.get(id_) is None:
                await self._rebuild_job(id_)

    async def _rebuild_job(self, id_: str) -> None:
        job = await self._lifecycle.jobs.objects.rebuild(id_)
        if job is not None:
            await self._table.put(job_row(job))
            logger.info("batch %s was read again from its files: %s", id_, job.status)

    async def _look_at_jobs(self) -> None:
        """End the jobs that are done, and queue what the queue has lost."""
        active = [job_of(row) for row in await self._table.active()]
        self._active_jobs, self._used_bytes = len(active), await self._table.used_bytes()
        for job in active:
            if await self._lifecycle.end_if_done(job):
                continue
            if not await self._lifecycle.queue.is_queued(job.id) or await self._is_stalled(job):
                await self._requeue(job)
        current = {job.id for job in active}
        self._stalled = {id_: seen for id_, seen in self._stalled.items() if id_ in current}

    async def _is_stalled(self, job: Job) -> bool:
        """Return whether a job makes no progress although its queue is empty."""
        done = await self._lifecycle.queue.finished(job.id)
        seen, times = self._stalled.get(job.id, (-1, 0))
        times = times + 1 if seen == done else 0
        self._stalled[job.id] = done, times
        if times < PATIENCE or await self._lifecycle.queue.has_chunks(job.id):
            return False
        self._stalled[job.id] = done, 0
        return True

    async def _requeue(self, job: Job) -> None:
        latest = await self._lifecycle.jobs.objects.rebuild(job.id)
        if latest is None:
            logger.error("batch %s cannot go on: its files are gone", job.id)
            await self._lifecycle.forget(job)
        elif latest.is_over:
            # Its gateway was stopped before it had followed the end, or the row was replaced by an older one.
            await self._lifecycle.end(FinalRecord(latest))
        else:
            await self._lifecycle.requeue(await self._lifecycle.jobs.put_latest(latest))

    async def sweep(self) -> None:
        """Remove what has expired. Raises: JobStoreUnavailable, ObjectsUnavailable."""
        now_s, table = self._lifecycle.jobs.now_s(), self._table
        read = {job_of(row).input_file for row in await table.active()}
        for record in map(file_of, await self._rows("file", lambda row: file_of(row).expires_s <= now_s)):
            if record.id not in read:
                await self._files.discard(record)
        for id_ in await table.unfinished(round((now_s - UNFINISHED_S) * 1000)):
            await table.remove(id_)
        before_s = now_s - self._files.settings.keep_s
        for job in map(job_of, await self._rows("batch", lambda row: _ended_before(row, before_s))):
            await self._remove_job(job)
        await self._files.objects.sweep(UNFINISHED_S)
        await asyncio.to_thread(self._sweep_journals, now_s)

    async def _rows(self, kind: Kind, is_wanted: Callable[[Row], bool]) -> list[Row]:
        """Return the wanted ones of all shown rows, which are removed only after they have been read."""
        found: list[Row] = []
        after = None
        while rows := await self._table.rows(Page(kind, None, ROWS_AT_ONCE, after)):
            found += [row for row in rows if is_wanted(row)]
            after = rows[-1].id
        return found

    async def _remove_job(self, job: Job) -> None:
        found = await self._files.objects.names(names.folder_of_job(job.id))
        # The record at its creation goes last: an interrupted removal is repeated.
        created = names.created(job.id)
        await self._files.objects.remove([name for name in found if name != created])
        await self._files.objects.remove([created])
        await self._lifecycle.forget(job)

    def _sweep_journals(self, now_s: float) -> None:
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now_s - JOURNALS_KEEP_S:
                    path.unlink()


def _ended_before(row: Row, moment_s: float) -> bool:
    ended_s = job_of(row).ended_s
    return ended_s is not None and ended_s <= moment_s
