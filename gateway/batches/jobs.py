"""Jobs as their owners see them: create, look, list and cancel."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from gateway.batches import names
from gateway.batches.files import Files
from gateway.batches.job_objects import JobObjects
from gateway.batches.job_store import VALIDATION, JobStore, Page, job_of, job_row
from gateway.batches.records import Counts, Endpoint, Job, Moment, cancelling, new_id
from gateway.errors import InvalidInput, NotFound, Overloaded
from gateway.events import BatchChanged, Observe

WINDOW_S = 24 * 3600


class NewJob(msgspec.Struct, frozen=True):
    """Request for a job. key, key_mark: of the key that sent it, as in a job."""

    tenant: str
    key: str
    endpoint: Endpoint
    input_file: str
    metadata: dict[str, str] | None = None
    results_keep_s: float | None = None
    key_mark: str = ""


class Jobs:
    """Jobs of all tenants. observe: takes their changes. now_s: seconds since 1970."""

    def __init__(
        self, files: Files, store: JobStore, observe: Observe, now_s: Callable[[], float] = time.time
    ) -> None:
        self.objects = JobObjects(files.objects)
        self.now_s = now_s
        self._files = files
        self._table = store.table
        self._queue = store.queue
        self._observe = observe
        # Wakes the runner of this process.
        self.changed = asyncio.Event()

    async def create(self, new: NewJob) -> Job:
        """Create a job whose input a gateway validates next.

        Raises: NotFound, InvalidInput, Overloaded, ObjectsUnavailable, JobStoreUnavailable.
        """
        record = await self._files.get(new.tenant, new.input_file)
        if record.purpose != "batch":
            raise InvalidInput(
                f"{new.input_file} was uploaded for {record.purpose!r}, not for `batch`",
                param="input_file_id",
            )
        most = self._files.settings.jobs_per_tenant
        if sum(row.tenant == new.tenant for row in await self._table.active()) >= most:
            raise Overloaded(f"you have {most} unfinished batches; wait for one, or cancel one")
        now_s, keep_s = self.now_s(), self._files.settings.keep_s
        job = Job(
            new_id("batch_"),
            new.tenant,
            new.key,
            new.endpoint,
            new.input_file,
            now_s,
            now_s + WINDOW_S,
            keep_s if new.results_keep_s is None else min(keep_s, new.results_keep_s),
            new.metadata,
            key_mark=new.key_mark,
        )
        await self.objects.create(names.created(job.id), job)
        # First: upkeep would queue a job again that the queue does not know.
        await self._queue.enqueue(job.id, [VALIDATION])
        await self._table.put(job_row(job))
        self.report(job)
        return job

    async def get(self, tenant: str | None, id_: str) -> Job:
        """Return a job with its counts so far. tenant: None for any.

        Raises: NotFound, JobStoreUnavailable.
        """
        row = await self._table.get(id_)
        if row is None or row.kind != "batch" or tenant not in {None, row.tenant}:
            raise NotFound(f"there is no batch {id_!r}", param="batch_id")
        return await self._with_counts(job_of(row))

    async def list(self, page: Page) -> tuple[list[Job], bool]:
        """Return jobs, newest first, and whether there are more. Raises: JobStoreUnavailable."""
        rows = await self._table.rows(msgspec.structs.replace(page, limit=page.limit + 1))
        jobs = [await self._with_counts(job_of(row)) for row in rows[: page.limit]]
        return jobs, len(rows) > page.limit

    async def cancel(self, tenant: str | None, id_: str) -> Job:
        """Cancel a job: its lines that run are finished, and no others are begun.

        Raises: NotFound, InvalidInput, ObjectsUnavailable, JobStoreUnavailable.
        """
        job = await self.get(tenant, id_)
        if job.is_over:
            raise InvalidInput(f"the batch is {job.status}: it cannot be cancelled", param="batch_id")
        if job.cancelling_s is None:
            moment = Moment(self.now_s())
            await self.objects.create(names.cancellation(id_), moment)
            job = cancelling(job, moment)
            await self._table.put(job_row(job))
            self.report(job)
        return job

    def report(self, job: Job) -> None:
        """Report a status that a job has reached."""
        self.changed.set()
        counts = job.counts
        self._observe(BatchChanged(job.id, job.tenant, job.status, counts.completed, counts.failed))

    async def _with_counts(self, job: Job) -> Job:
        if job.is_over or not job.total:
            return job
        counts = Counts()
        for result in (await self._queue.progress(job.id)).values():
            counts = counts.plus(result.counts)
        return msgspec.structs.replace(job, counts=counts)
