"""Files and jobs of one process: their composition, the background work, and upkeep.

Upkeep looks at all jobs every few seconds; several gateways may take every step at once. At its start, and
when the store has lost data (a number in it that rises went back), it adds rows that are missing, from the
objects. It ends jobs that are done, queues chunks that the queue has lost, and removes what has expired.
Files and jobs are served once the rows were built the first time. A gateway whose objects are not those of
the other gateways of its store serves none.
"""

import asyncio
import logging
import secrets
import time
from math import inf
from pathlib import Path

import msgspec

from gateway.batches.files import Files
from gateway.batches.jobs import Jobs, OnChange
from gateway.batches.lines import LineServer
from gateway.batches.objects import FolderObjects, Objects, ObjectsUnavailable, read_record, remove_older
from gateway.batches.records import (
    FILE_RECORD,
    FILES,
    IDENTITY,
    JOB_CREATED,
    JOB_FOLDER,
    JOBS,
    FileRecord,
    FinalRecord,
    Job,
)
from gateway.batches.redis_store import RedisJobStore
from gateway.batches.runner import Runner
from gateway.batches.sqlite_store import SqliteJobStore
from gateway.batches.store import (
    ROWS_AT_ONCE,
    JobStore,
    Page,
    QueueState,
    all_rows,
    file_of,
    file_row,
    job_of,
    job_row,
)
from gateway.config.boot import AppBoot
from gateway.config.state_folder import JOBS_FILE
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient

# Folder of the journals of chunks that run.
JOURNALS = "journals"
# No caller waits for a chunk, and a caller that lists its jobs can wait for a busy Redis.
STORE_TIMEOUT_S = 2.0
LOOK_EVERY_S = 3.0
SWEEP_EVERY_S = 600.0
# An upload that has not grown for so long belongs to a gateway that was killed.
UNFINISHED_S = 6 * 3600.0
# Longer than any job runs.
JOURNALS_KEEP_S = 2 * 24 * 3600.0
# Looks at a job before its missing chunks are put into the queue again.
PATIENCE = 5
STARTING = "files and batches are being read; try again"
OTHER_OBJECTS = "this gateway has another `batches.dir` or bucket than the other gateways of its Redis"

logger = logging.getLogger("gateway")


class OtherObjects(Exception):
    """The gateways of one Redis use different folders or buckets."""


class Batches:
    """Files and jobs of one process, as the API uses them, with their background work.

    problem: why they cannot be served, None if they can. ready: set once they could be. state: number of
    active jobs, bytes of all files, and the longest time without progress of an active job, as they were last
    seen. folder: of the journals.
    """

    def __init__(self, files: Files, jobs: Jobs, folder: Path) -> None:
        self.files = files
        self.jobs = jobs
        self.problem: str | None = STARTING
        self.ready = asyncio.Event()
        self.state = 0, 0, 0.0
        self._objects = files.objects
        self._store = files.store
        self._folder = folder
        self._beat = 0
        self._is_built = False
        self._swept_s = 0.0
        # Number of a job's finished chunks, and of the looks since it has risen.
        self._stalled: dict[str, tuple[int, int]] = {}
        # Number of a job's finished chunks, and when it was first seen.
        self._progress: dict[str, tuple[int, float]] = {}

    async def run(self, server: LineServer) -> None:
        """Run jobs, and look after what they leave, until cancelled."""
        upkeep = asyncio.create_task(self._look_forever())
        try:
            await self.ready.wait()
            await Runner(self.files.settings, self.jobs, server, self._folder).run()
        finally:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            await self._store.aclose()

    async def _look_forever(self) -> None:
        while True:
            try:
                await self._look()
                self.problem = None
                self.ready.set()
            except OtherObjects:
                if self.problem != OTHER_OBJECTS:
                    logger.error("batches are off: %s", OTHER_OBJECTS)  # noqa: TRY400 - its cause is known
                self.problem = OTHER_OBJECTS
            except (StoreUnavailable, ObjectsUnavailable) as error:
                logger.warning("batches wait for their store or their files: %s", error)
                if not self._is_built:
                    self.problem = f"files and batches are unavailable: {error}"
            except Exception:
                # Upkeep must go on: a job would never end.
                logger.exception("the upkeep of batches failed")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        """Look once. Raises: OtherObjects, StoreUnavailable, ObjectsUnavailable."""
        beat = await self._store.beat()
        if not self._is_built or beat <= self._beat:
            await self._check_identity()
            await self._rebuild()
            self._is_built = True
        self._beat = beat
        await self._look_at_jobs()
        now_s = time.monotonic()
        if not self._swept_s or now_s - self._swept_s > SWEEP_EVERY_S:
            self._swept_s = now_s
            await self._sweep()

    async def _check_identity(self) -> None:
        await self._objects.create(IDENTITY, msgspec.json.encode(secrets.token_hex(16)))
        identity = await self._objects.read(IDENTITY)
        if identity is None or await self._store.agree(identity.decode()) != identity.decode():
            raise OtherObjects

    async def _rebuild(self) -> None:
        """Add the rows that are missing."""
        for name in await self._objects.names(FILES):
            id_, _, kind = name.removeprefix(FILES).partition(".")
            if kind == "json" and await self._store.get(id_) is None:
                record = await read_record(self._objects, FILE_RECORD.format(id_), FileRecord)
                if record is not None:
                    await self._store.put(file_row(record))
        # Only the folders: the objects of all jobs may be millions.
        for id_ in await self._objects.folders(JOBS):
            if await self._store.get(id_) is None and (job := await self.jobs.rebuild(id_)) is not None:
                await self._store.put(job_row(job))
                logger.info("batch %s was read again from its files: %s", id_, job.status)

    async def _look_at_jobs(self) -> None:
        """End the jobs that are done, and queue what the queue has lost."""
        active = [job_of(row) for row in await self._store.active()]
        used_bytes, now_s = await self._store.used_bytes(), time.monotonic()
        idle_s = 0.0
        for job in active:
            if await self.jobs.end_if_done(job):
                continue
            queue = await self._store.queue_of(job.id)
            if self._progress.get(job.id, (-1, 0.0))[0] != queue.finished:
                self._progress[job.id] = queue.finished, now_s
            idle_s = max(idle_s, now_s - self._progress[job.id][1])
            if not queue.is_known or self._is_stalled(job.id, queue):
                await self._requeue(job)
        current = {job.id for job in active}
        self._stalled = {id_: seen for id_, seen in self._stalled.items() if id_ in current}
        self._progress = {id_: seen for id_, seen in self._progress.items() if id_ in current}
        self.state = len(active), used_bytes, idle_s

    def _is_stalled(self, job: str, queue: QueueState) -> bool:
        """Return whether a job makes no progress although its queue is empty."""
        seen, looks = self._stalled.get(job, (-1, 0))
        looks = looks + 1 if seen == queue.finished else 0
        is_stalled = looks >= PATIENCE and not queue.open
        self._stalled[job] = queue.finished, 0 if is_stalled else looks
        return is_stalled

    async def _requeue(self, job: Job) -> None:
        latest = await self.jobs.rebuild(job.id)
        if latest is None:
            logger.error("batch %s cannot go on: its files are gone", job.id)
            await self.jobs.forget(job)
        elif latest.is_over:
            # Its gateway was stopped before it had followed the end, or the row was replaced by an older one.
            await self.jobs.end(FinalRecord(latest))
        else:
            await self.jobs.requeue(await self.jobs.put_latest(latest))

    async def _sweep(self) -> None:
        """Remove what has expired. Rows are removed only after all of them have been read."""
        now_s, store = self.jobs.now_s(), self._store
        inputs = {job_of(row).input_file for row in await store.active()}
        files = all_rows(store, Page("file", None, ROWS_AT_ONCE))
        for record in [file async for row in files if (file := file_of(row)).expires_s <= now_s]:
            if record.id not in inputs:
                await self.files.discard(record)
        for id_ in await store.unfinished(round((now_s - UNFINISHED_S) * 1000)):
            await store.remove(id_)
        before_s = now_s - self.files.settings.keep_s
        jobs = all_rows(store, Page("batch", None, ROWS_AT_ONCE))
        for job in [job async for row in jobs if ((job := job_of(row)).ended_s or inf) <= before_s]:
            await self._remove_job(job)
        await self._objects.sweep(UNFINISHED_S)
        if self._folder.is_dir():
            await asyncio.to_thread(remove_older, self._folder, now_s - JOURNALS_KEEP_S)

    async def _remove_job(self, job: Job) -> None:
        found = await self._objects.names(JOB_FOLDER.format(job.id))
        # The record at its creation goes last: an interrupted removal is repeated.
        created = JOB_CREATED.format(job.id)
        await self._objects.remove([name for name in found if name != created])
        await self._objects.remove([created])
        await self.jobs.forget(job)


def open_batches(boot: AppBoot, on_change: OnChange) -> Batches | None:
    """Return files and jobs, None if the configuration has none. on_change: as of `Jobs`. Raises: OSError."""
    settings = boot.config.batches
    if settings is None:
        return None
    folder, url = Path(settings.dir), boot.config.quotas.store
    objects: Objects
    if settings.bucket is None:
        objects = FolderObjects(folder)
    else:
        # An optional package.
        from gateway.batches.bucket import BucketObjects

        objects = BucketObjects(settings.bucket)
    store: JobStore
    if url != "memory":
        store = RedisJobStore(RedisClient(url, STORE_TIMEOUT_S))
    else:
        store = SqliteJobStore(Path(boot.jobs_file) if boot.jobs_file else folder / JOBS_FILE)
    files = Files(settings, objects, store)
    return Batches(files, Jobs(files, on_change), folder / JOURNALS)
