"""Jobs as their owners see them: create, look, list and cancel."""

import asyncio
import time
from collections.abc import Callable
from functools import reduce

import msgspec

from gateway.batches import names
from gateway.batches.files import ROWS_AT_ONCE, Files, storage_full
from gateway.batches.job_objects import JobObjects
from gateway.batches.job_store import (
    VALIDATION,
    JobStore,
    Page,
    RowBounds,
    StorageFull,
    TooManyRows,
    job_of,
    job_row,
)
from gateway.batches.records import Counts, Endpoint, Job, Moment, Owner, cancelling, new_id
from gateway.errors import FileStorageFull, GatewayError, InvalidInput, NotFound, Overloaded

WINDOW_S = 24 * 3600
# Jobs whose counts are remembered.
COUNTS_MAX = 1000
# The queue has its chunks, and no gateway has one of them.
NO_PLACE = "no gateway has room for it now: other batches run first"

OnChange = Callable[[Job], None]


class NewJob(msgspec.Struct, frozen=True):
    """Request for a job. key, key_mark: of the key that sent it, as in a job. owner: as for `Files.get`."""

    tenant: str
    key: str
    endpoint: Endpoint
    input_file: str
    metadata: dict[str, str] | None = None
    results_keep_s: float | None = None
    key_mark: str = ""
    owner: Owner | None = None


class JobState(msgspec.Struct, frozen=True):
    """A job with its counts so far. wait_reason: why its lines wait, None if they do not."""

    job: Job
    wait_reason: str | None = None


class Jobs:
    """Jobs of all tenants. on_change: takes a job with each new status. now_s: seconds since 1970."""

    def __init__(
        self, files: Files, store: JobStore, on_change: OnChange, now_s: Callable[[], float] = time.time
    ) -> None:
        self.objects = JobObjects(files.objects)
        self.now_s = now_s
        self._files = files
        self._table = store.table
        self._queue = store.queue
        self._waits = store.waits
        self._on_change = on_change
        # Counts of jobs, with the number of their finished chunks then.
        self._counts: dict[str, tuple[int, Counts]] = {}
        # Wakes the runner of this process.
        self.changed = asyncio.Event()

    async def create(self, new: NewJob) -> Job:
        """Create a job whose input a gateway validates next.

        Raises: NotFound, InvalidInput, Overloaded, FileStorageFull, ObjectsUnavailable, JobStoreUnavailable.
        """
        record = await self._files.get(new.tenant, new.input_file, new.owner)
        if record.purpose != "batch":
            raise InvalidInput(
                f"{new.input_file} was uploaded for {record.purpose!r}, not for `batch`",
                param="input_file_id",
            )
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
        try:
            await self._store(job)
        except (StorageFull, TooManyRows) as error:
            raise self._refusal(error) from error
        self.report(job)
        return job

    async def _store(self, job: Job) -> None:
        """Store a new job, if its tenant has room for it. Raises: StorageFull, TooManyRows."""
        settings, row = self._files.settings, job_row(job)
        counts = RowBounds(settings.kept_jobs_per_tenant, settings.jobs_per_tenant)
        # What is refused writes nothing.
        await self._table.check(row, self._files.bounds, counts)
        await self.objects.create(names.created(job.id), job)
        # First: upkeep would queue a job again that the queue does not know.
        await self._queue.enqueue(job.id, [VALIDATION])
        try:
            await self._table.put(row, self._files.bounds, counts)
        except (StorageFull, TooManyRows):
            # Others have taken the room meanwhile.
            await self._queue.drop(job.id)
            await self._files.objects.remove([names.created(job.id)])
            raise

    def _refusal(self, error: StorageFull | TooManyRows) -> GatewayError:
        """Return the error of a job for which there is no room."""
        settings = self._files.settings
        if isinstance(error, StorageFull):
            return storage_full(self._files.bounds, error)
        if error.of_active:
            return Overloaded(
                f"you have {settings.jobs_per_tenant} unfinished batches; wait for one, or cancel one"
            )
        return FileStorageFull(
            f"you have {settings.kept_jobs_per_tenant} batches, ended ones included, the most that a tenant "
            "may (`batches.kept_jobs_per_tenant`); an ended batch is removed "
            f"{settings.keep_s:.0f} s after its end"
        )

    async def get(self, tenant: str | None, id_: str, owner: Owner | None = None) -> JobState:
        """Return the state of a job. tenant: None for any. owner: as for `Files.get`.

        Raises: NotFound, JobStoreUnavailable.
        """
        row = await self._table.get(id_)
        if row is None or row.kind != "batch" or tenant not in {None, row.tenant}:
            raise NotFound(f"there is no batch {id_!r}", param="batch_id")
        job = job_of(row)
        if owner is not None and not owner.owns(job):
            raise NotFound(f"there is no batch {id_!r}", param="batch_id")
        return await self._state_of(job)

    async def list_own(self, page: Page, owner: Owner) -> tuple[list[JobState], bool]:
        """Return jobs of one key, newest first, and whether there are more. Raises: JobStoreUnavailable."""
        found: list[Job] = []
        after, room = page.after, page.data_bytes
        while rows := await self._table.rows(msgspec.structs.replace(page, after=after, limit=ROWS_AT_ONCE)):
            for row in rows:
                if not owner.owns(job := job_of(row)):
                    continue
                if len(found) == page.limit or (found and row.data_bytes > room):
                    return [await self._state_of(each) for each in found], True
                found.append(job)
                room -= row.data_bytes
            after = rows[-1].id
        return [await self._state_of(each) for each in found], False

    async def list(self, page: Page) -> tuple[list[JobState], bool]:
        """Return jobs, newest first, and whether there are more. Raises: JobStoreUnavailable."""
        rows = await self._table.rows(msgspec.structs.replace(page, limit=page.limit + 1))
        has_more = len(rows) > page.limit or sum(row.data_bytes for row in rows) > page.data_bytes
        shown = rows[:-1] if has_more and len(rows) > 1 else rows
        return [await self._state_of(job_of(row)) for row in shown], has_more

    async def cancel(self, tenant: str | None, id_: str, owner: Owner | None = None) -> Job:
        """Cancel a job: its lines that run are finished, and no others are begun.

        Raises: NotFound, InvalidInput, ObjectsUnavailable, JobStoreUnavailable.
        """
        job = (await self.get(tenant, id_, owner)).job
        if job.is_over:
            raise InvalidInput(f"the batch is {job.status}: it cannot be cancelled", param="batch_id")
        if job.cancelling_s is None:
            moment = Moment(self.now_s())
            await self.objects.create(names.cancellation(id_), moment)
            job = await self.put_latest(cancelling(job, moment))
            self.report(job)
        return job

    async def put_latest(self, job: Job) -> Job:
        """Store the row of a job that has not ended; return the job as it was stored.

        Its validation may end, or its owner cancel it, meanwhile: the row of that must not be replaced by an
        older one.
        """
        await self._table.put(job_row(job))
        latest = await self.objects.latest(job)
        if latest != job:
            await self._table.put(job_row(latest))
        return latest

    def report(self, job: Job) -> None:
        """Report a status that a job has reached."""
        self.changed.set()
        self._on_change(job)

    async def _state_of(self, job: Job) -> JobState:
        if job.is_over:
            return JobState(job)
        reason = None
        if job.status in {"validating", "in_progress"}:
            reason = await self._waits.get(job.id)
            if reason is None and await self._queue.is_idle(job.id):
                reason = NO_PLACE
        return JobState(await self._with_counts(job), reason)

    async def _with_counts(self, job: Job) -> Job:
        if not job.total:
            return job
        # A list may have a hundred jobs of thousands of chunks each.
        done = await self._queue.finished(job.id)
        known, counts = self._counts.pop(job.id, (0, Counts()))
        if known != done:
            results = (await self._queue.progress(job.id)).values()
            done, counts = len(results), reduce(Counts.plus, (result.counts for result in results), Counts())
        self._counts[job.id] = done, counts
        if len(self._counts) > COUNTS_MAX:
            del self._counts[next(iter(self._counts))]
        return msgspec.structs.replace(job, counts=counts)
