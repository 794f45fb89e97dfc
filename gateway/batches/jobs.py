"""Jobs: every step from their creation to their removal, which any gateway may take, and repeat.

The objects of a job decide. Its record, its plan, its cancellation, the marks of its chunks and its end are
each created once, and the first writer wins. The row in the store and the queue of its chunks follow them:

    create -> job.json, row, queue: validation
    validate -> plan.json, row, queue: one entry for each chunk
    cancel -> cancel.json, row
    finish_chunk (by the runner, for each chunk) -> queue: result
    end, after the last chunk -> final.json, records and rows of the files of results, row; queue: dropped

Two gateways that take one step at once therefore write the same in the end; a row that an older state would
replace is computed again from the marks (`put_latest`).
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from gateway.batches.files import Files
from gateway.batches.lines import CheckModel, LineChecker, LineRules
from gateway.batches.objects import create_record, read_record
from gateway.batches.records import (
    CHUNK_MARK,
    CHUNK_MARKS,
    CHUNK_RESULTS,
    FILE_DATA,
    FILE_RECORD,
    JOB_CANCELLATION,
    JOB_CREATED,
    JOB_FINAL,
    JOB_PLAN,
    PARTS,
    ChunkResult,
    Counts,
    Endpoint,
    FileRecord,
    FinalRecord,
    Job,
    LineProblem,
    Moment,
    Owner,
    Part,
    Plan,
    new_id,
    result_file_id,
    total,
)
from gateway.batches.store import (
    ROWS_AT_ONCE,
    VALIDATION,
    BoundExceeded,
    Page,
    Row,
    chunk_row,
    chunk_row_id,
    file_row,
    find,
    job_of,
    job_row,
)
from gateway.errors import InvalidInput, NotFound

WINDOW_S = 24 * 3600
# Jobs whose counts are remembered.
COUNTS_MAX = 1000
READS_AT_ONCE = 16
# The queue has its chunks, and no gateway has one of them.
NO_PLACE = "no gateway has room for it now: other batches run first"
UNREADABLE = LineProblem("internal_error", "the gateway failed to read the input; its log has the reason")
NO_INPUT = LineProblem("input_file_missing", "the input file has been removed", "input_file_id")

OnChange = Callable[[Job], None]


class JobState(msgspec.Struct, frozen=True):
    """A job with its counts so far. wait_reason: why its lines wait, None if they do not."""

    job: Job
    wait_reason: str | None = None


class Jobs:
    """Jobs of all tenants. Every step raises ObjectsUnavailable and StoreUnavailable.

    on_change: takes a job with each new status. now_s: seconds since 1970. owner: whose jobs alone are found,
    None for all of the tenant. changed: wakes the runner of this process.
    """

    def __init__(self, files: Files, on_change: OnChange, now_s: Callable[[], float] = time.time) -> None:
        self.objects = files.objects
        self.store = files.store
        self.bounds = files.bounds
        self.now_s = now_s
        self.changed = asyncio.Event()
        self.files = files
        self._on_change = on_change
        # Counts of jobs, with the number of their finished chunks then.
        self._counts: dict[str, tuple[int, Counts]] = {}
        # Jobs that this process is about to end: several of their chunks may finish at once.
        self._ending: set[str] = set()

    async def create(
        self,
        tenant: str,
        key: Owner,
        endpoint: Endpoint,
        input_file: str,
        metadata: dict[str, str] | None = None,
        results_keep_s: float | None = None,
        owner: Owner | None = None,
    ) -> Job:
        """Create a job whose input a gateway validates next. key: its lines run as this. owner: of the input.

        Raises: NotFound, InvalidInput, Overloaded, FileStorageFull.
        """
        record = await self.files.get(tenant, input_file, owner)
        if record.purpose != "batch":
            raise InvalidInput(
                f"{input_file} was uploaded for {record.purpose!r}, not for `batch`", param="input_file_id"
            )
        now_s, keep_s = self.now_s(), self.files.settings.keep_s
        job = Job(
            new_id("batch_"),
            tenant,
            key.key,
            endpoint,
            input_file,
            now_s,
            now_s + WINDOW_S,
            keep_s if results_keep_s is None else min(keep_s, results_keep_s),
            metadata,
            key_mark=key.mark,
        )
        try:
            await self._add(job)
        except BoundExceeded as error:
            raise self.files.refusal(error, "batch") from error
        self._report(job)
        return job

    async def _add(self, job: Job) -> None:
        """Store a new job, if its tenant has room for it. Raises: BoundExceeded."""
        settings, row = self.files.settings, job_row(job)
        most = {"shown": settings.kept_jobs_per_tenant, "active": settings.jobs_per_tenant}
        bounds = msgspec.structs.replace(self.bounds, **most)
        # What is refused writes nothing.
        await self.store.put(row, bounds, is_trial=True)
        await create_record(self.objects, JOB_CREATED.format(job.id), job)
        # First: upkeep would queue a job again that the queue does not know.
        await self.store.enqueue(job.id, [VALIDATION])
        try:
            await self.store.put(row, bounds)
        except BoundExceeded:
            # Others have taken the room meanwhile.
            await self.store.drop(job.id)
            await self.objects.remove([JOB_CREATED.format(job.id)])
            raise

    async def get(self, tenant: str | None, id_: str, owner: Owner | None = None) -> JobState:
        """Return the state of a job. tenant: None for any. Raises: NotFound."""
        row = await self.store.get(id_)
        if row is not None and row.kind == "batch" and tenant in {None, row.tenant}:
            job = job_of(row)
            if owner is None or owner.owns(job):
                return await self._state_of(job)
        raise NotFound(f"there is no batch {id_!r}", param="batch_id")

    async def list(self, page: Page, owner: Owner | None = None) -> tuple[list[JobState], bool]:
        """Return jobs, newest first, and whether there are more."""

        def read(row: Row) -> Job | None:
            job = job_of(row)
            return job if owner is None or owner.owns(job) else None

        at_once = ROWS_AT_ONCE if owner is not None else page.limit + 1
        found, has_more = await find(self.store, page, read, at_once)
        return [await self._state_of(job) for job in found], has_more

    async def _state_of(self, job: Job) -> JobState:
        if job.is_over:
            return JobState(job)
        queue, reason = await self.store.queue_of(job.id), None
        if job.status in {"validating", "in_progress"}:
            reason = await self.store.wait_of(job.id) or (NO_PLACE if queue.is_idle else None)
        return JobState(await self._with_counts(job, queue.finished), reason)

    async def _with_counts(self, job: Job, done: int) -> Job:
        """Return a job with its counts, which are read again only after a chunk has been finished."""
        if not job.total:
            return job
        # A list may have a hundred jobs of thousands of chunks each.
        known, counts = self._counts.pop(job.id, (0, Counts()))
        if known != done:
            results = (await self.store.progress(job.id)).values()
            done, counts = len(results), total(result.counts for result in results)
        self._counts[job.id] = done, counts
        if len(self._counts) > COUNTS_MAX:
            del self._counts[next(iter(self._counts))]
        return msgspec.structs.replace(job, counts=counts)

    async def cancel(self, tenant: str | None, id_: str, owner: Owner | None = None) -> Job:
        """Cancel a job: its lines that run are finished, and no others are begun.

        Raises: NotFound, InvalidInput.
        """
        job = (await self.get(tenant, id_, owner)).job
        if job.is_over:
            raise InvalidInput(f"the batch is {job.status}: it cannot be cancelled", param="batch_id")
        if job.cancelling_s is None:
            moment = Moment(self.now_s())
            await create_record(self.objects, JOB_CANCELLATION.format(id_), moment)
            job = await self.put_latest(job.cancelled_at(moment))
            self._report(job)
        return job

    async def put_latest(self, job: Job) -> Job:
        """Store the row of a job that has not ended; return the job as it was stored.

        Its validation may end, or its owner cancel it, meanwhile: the row of that must not be replaced by an
        older one.
        """
        await self.store.put(job_row(job))
        latest = await self._latest(job)
        if latest != job:
            await self.store.put(job_row(latest))
        return latest

    async def validate(self, job: Job, rules: LineRules, check_model: CheckModel) -> None:
        """Read the input, plan its chunks and put them into the queue; or end the job."""
        plan = await self.plan_of(job.id)
        if plan is None:
            plan = await self._check_room(job, await self._check_input(job, rules, check_model))
        await self._follow(job, plan)

    async def _check_input(self, job: Job, rules: LineRules, check_model: CheckModel) -> Plan:
        checker = LineChecker(rules, check_model)
        if await self.store.get(job.input_file) is None:
            return Plan(self.now_s(), problems=(NO_INPUT,))
        async with aclosing(self.objects.stream(FILE_DATA.format(job.input_file))) as blocks:
            async for block in blocks:
                await asyncio.to_thread(checker.feed, block)
                if checker.is_hopeless:
                    break
        return await asyncio.to_thread(checker.finish, self.now_s())

    async def _check_room(self, job: Job, plan: Plan) -> Plan:
        """Reserve the bytes of the results that a job has at least; without room its plan is to fail."""
        if plan.problems:
            return plan
        reserved = msgspec.structs.replace(
            job, chunks=len(plan.chunks), unexecuted_bytes=plan.unexecuted_bytes
        )
        try:
            await self.store.put(job_row(reserved), self.bounds)
        except BoundExceeded as error:
            message = self.files.refusal(error, "batch").message
            return Plan(self.now_s(), problems=(LineProblem("storage_full", message),))
        return plan

    async def fail(self, job: Job) -> None:
        """End a job whose validation fails for an unexpected reason, or whose plan is lost."""
        await self._follow(job, Plan(self.now_s(), problems=(UNREADABLE,)))

    async def _follow(self, job: Job, plan: Plan) -> None:
        """Create a plan, unless there is one, and follow it."""
        if not await create_record(self.objects, JOB_PLAN.format(job.id), plan):
            plan = await self.plan_of(job.id) or plan
        job = (await self._latest(job)).planned(plan)
        if job.is_over:
            await self.end(FinalRecord(job))
        else:
            await self.store.enqueue(job.id, range(len(plan.chunks)))
            self._report(await self.put_latest(job))
        await self.store.finish(job.id, VALIDATION, None)

    async def finish_chunk(self, job: Job, number: int, result: ChunkResult) -> None:
        """Count the stored result of a chunk, and end the job if it was the last one."""
        await self.store.finish(job.id, number, result)
        await self.end_if_done(job)

    async def end_if_done(self, job: Job) -> bool:
        """End a job whose chunks all have results."""
        if job.in_progress_s is None or job.id in self._ending:
            return False
        if (await self.store.queue_of(job.id)).finished < job.chunks or job.id in self._ending:
            return False
        self._ending.add(job.id)
        try:
            results = await self.store.progress(job.id)
            final = await self.final_of(job.id)
            if final is None:
                final = self._finalized(await self._latest(job), results)
                await self.store.put(job_row(msgspec.structs.replace(final.job, status="finalizing")))
            await self.end(final)
        finally:
            self._ending.discard(job.id)
        return True

    def _finalized(self, job: Job, results: dict[int, ChunkResult]) -> FinalRecord:
        """Return the end of a job from the results of its chunks."""
        ordered = sorted(results.items())
        counts = total(result.counts for _, result in ordered)
        sizes: dict[Part, int] = {part: sum(result.sizes[part] for _, result in ordered) for part in PARTS}
        parts: dict[Part, tuple[str, ...]] = {
            part: tuple(
                CHUNK_RESULTS.format(job.id, number, result.attempt, part)
                for number, result in ordered
                if result.sizes[part]
            )
            for part in PARTS
        }
        return FinalRecord(job.ended(counts, sizes, self.now_s()), parts, sizes)

    async def end(self, final: FinalRecord) -> None:
        """Record the end of a job, and add its files of results."""
        is_first = await create_record(self.objects, JOB_FINAL.format(final.job.id), final)
        if not is_first:
            final = await self.final_of(final.job.id) or final
        for part in PARTS:
            if final.sizes.get(part):
                record = self._result_file(final, part)
                await create_record(self.objects, FILE_RECORD.format(record.id), record)
                await self.store.put(file_row(record))
        await self.store.put(job_row(final.job))
        await self.drop_chunks(final.job)
        if is_first:
            self._report(final.job)

    def _result_file(self, final: FinalRecord, part: Part) -> FileRecord:
        """Return the record of a job's file of results."""
        job = final.job
        ended_s = job.ended_s or self.now_s()
        return FileRecord(
            result_file_id(job.id, part),
            job.tenant,
            f"{job.id}_{'output' if part == 'out' else 'error'}.jsonl",
            "batch_output",
            final.sizes[part],
            ended_s,
            ended_s + job.keep_s,
            job.id,
            part,
            key=job.key,
            key_mark=job.key_mark,
        )

    async def forget(self, job: Job) -> None:
        """Remove the rows of a job whose objects are gone."""
        await self.drop_chunks(job)
        await self.store.remove(job.id)

    async def drop_chunks(self, job: Job) -> None:
        """Remove what the queue and the table have of a job's chunks."""
        for number in range(job.chunks):
            # Their bytes are those of the files of results now.
            await self.store.remove(chunk_row_id(job.id, number))
        await self.store.drop(job.id)

    async def requeue(self, job: Job) -> None:
        """Put the chunks of a job that have no result into the queue, which has lost them."""
        plan = await self.plan_of(job.id)
        if plan is None:
            await self.store.enqueue(job.id, [VALIDATION])
            return
        marks = await self.objects.names(CHUNK_MARKS.format(job.id))
        finished = [int(mark.rpartition("/")[2].removesuffix(".json")) for mark in marks]
        for start in range(0, len(finished), READS_AT_ONCE):
            part = finished[start : start + READS_AT_ONCE]
            await asyncio.gather(*(self._count_again(job, number) for number in part))
        missing = sorted({*range(len(plan.chunks))} - {*finished})
        await self.store.enqueue(job.id, missing)

    async def _count_again(self, job: Job, number: int) -> None:
        result = await self.result_of(job.id, number)
        if result is not None:
            await self.store.put(chunk_row(job, number, sum(result.sizes.values())))
            await self.store.finish(job.id, number, result)

    async def rebuild(self, id_: str) -> Job | None:
        """Return a job as its objects describe it, None if there is no such job."""
        final = await self.final_of(id_)
        if final is not None:
            return final.job
        created = await read_record(self.objects, JOB_CREATED.format(id_), Job)
        return None if created is None else await self._latest(created)

    async def plan_of(self, id_: str) -> Plan | None:
        """Return the plan of a job, None before its validation."""
        return await read_record(self.objects, JOB_PLAN.format(id_), Plan)

    async def final_of(self, id_: str) -> FinalRecord | None:
        """Return the end of a job, None before it."""
        return await read_record(self.objects, JOB_FINAL.format(id_), FinalRecord)

    async def result_of(self, id_: str, number: int) -> ChunkResult | None:
        """Return the stored result of a chunk, None if it has none."""
        return await read_record(self.objects, CHUNK_MARK.format(id_, number), ChunkResult)

    async def _latest(self, job: Job) -> Job:
        """Return a job that has not ended with the marks of its plan and its cancellation."""
        plan = await self.plan_of(job.id)
        if plan is not None:
            job = job.planned(plan)
        moment = await read_record(self.objects, JOB_CANCELLATION.format(job.id), Moment)
        return job if moment is None or job.is_over else job.cancelled_at(moment)

    def _report(self, job: Job) -> None:
        """Report a status that a job has reached."""
        self.changed.set()
        self._on_change(job)
