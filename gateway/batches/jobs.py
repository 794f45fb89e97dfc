"""Jobs from their creation to their end. Every step may be repeated, by any gateway, at any time.

The objects of a job decide: its plan, the mark of its cancellation, the marks of its chunks and its final
record are each created once, and the first writer wins. Rows in the store follow them.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from gateway.batches import names
from gateway.batches.files import Files
from gateway.batches.job_store import VALIDATION, JobStore, Page, Row, file_row, job_of, job_row
from gateway.batches.lines import CheckModel, LineChecker, LineRules
from gateway.batches.objects import Objects
from gateway.batches.records import (
    PARTS,
    TERMINAL,
    ChunkResult,
    Counts,
    Endpoint,
    FileRecord,
    FinalRecord,
    Job,
    LineProblem,
    Moment,
    Part,
    Plan,
    cancelling,
    ended,
    new_id,
    planned,
    result_file_id,
)
from gateway.errors import InvalidInput, NotFound, Overloaded
from gateway.events import BatchChanged, Observe

WINDOW_S = 24 * 3600
READS_AT_ONCE = 16
NO_INPUT = LineProblem("input_file_missing", "the input file has been removed", "input_file_id")
Result = TypeVar("Result")


class NewJob(msgspec.Struct, frozen=True):
    """Request for a job. key: id of the key that sent it."""

    tenant: str
    key: str
    endpoint: Endpoint
    input_file: str
    metadata: dict[str, str] | None = None
    results_keep_s: float | None = None


class Jobs:
    """Jobs of all tenants. observe: takes their changes. now_s: seconds since 1970."""

    def __init__(self, files: Files, observe: Observe, now_s: Callable[[], float] = time.time) -> None:
        self._files = files
        self._observe = observe
        self.now_s = now_s
        self._ending: set[str] = set()
        # Wakes the runner of this process.
        self.changed = asyncio.Event()

    @property
    def objects(self) -> Objects:
        """Objects of files and jobs."""
        return self._files.objects

    @property
    def store(self) -> JobStore:
        """Rows and chunks."""
        return self._files.store

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
        if sum(row.tenant == new.tenant for row in await self.store.active()) >= most:
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
        )
        await self.objects.create(names.created(job.id), msgspec.json.encode(job))
        await self.store.put(job_row(job))
        await self.store.enqueue(job.id, [VALIDATION])
        self._report(job)
        return job

    async def get(self, tenant: str | None, id_: str) -> Job:
        """Return a job with its counts so far. tenant: None for any.

        Raises: NotFound, JobStoreUnavailable.
        """
        row = await self.store.get(id_)
        if row is None or row.kind != "batch" or tenant not in {None, row.tenant}:
            raise NotFound(f"there is no batch {id_!r}", param="batch_id")
        return await self._with_counts(job_of(row))

    async def list(self, page: Page) -> tuple[list[Job], bool]:
        """Return jobs, newest first, and whether there are more. Raises: JobStoreUnavailable."""
        rows = await self.store.rows(msgspec.structs.replace(page, limit=page.limit + 1))
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
            await self.objects.create(names.cancellation(id_), msgspec.json.encode(moment))
            job = cancelling(job, moment)
            await self.store.put(job_row(job))
            self._report(job)
        return job

    async def validate(self, job: Job, rules: LineRules, check_model: CheckModel) -> None:
        """Read the input, plan its chunks and put them into the queue; or end the job.

        Raises: ObjectsUnavailable, JobStoreUnavailable.
        """
        plan = await self.plan_of(job.id)
        if plan is None:
            plan = await self._check_input(job, rules, check_model)
            if not await self.objects.create(names.plan(job.id), msgspec.json.encode(plan)):
                plan = await self.plan_of(job.id) or plan
        job = planned(await self._latest(job), plan)
        if job.status == "failed":
            await self._end(FinalRecord(job))
        else:
            await self.store.enqueue(job.id, range(len(plan.chunks)))
            await self.store.put(job_row(job))
            self._report(job)
        await self.store.finish(job.id, VALIDATION, None)

    async def _check_input(self, job: Job, rules: LineRules, check_model: CheckModel) -> Plan:
        checker = LineChecker(rules, check_model)
        row = await self.store.get(job.input_file)
        if row is None:
            return Plan(self.now_s(), problems=(NO_INPUT,))
        async with aclosing(self._input_of(job)) as blocks:
            async for block in blocks:
                await asyncio.to_thread(checker.feed, block)
                if checker.is_hopeless:
                    break
        return await asyncio.to_thread(checker.finish, self.now_s())

    def _input_of(self, job: Job) -> AsyncGenerator[bytes, None]:
        return self.objects.stream(names.data_of_file(job.input_file))

    async def plan_of(self, job: str) -> Plan | None:
        """Return the plan of a job, None before its validation. Raises: ObjectsUnavailable."""
        return await self._read(names.plan(job), Plan)

    async def result_of(self, job: str, number: int) -> ChunkResult | None:
        """Return the stored result of a chunk, None if it has none. Raises: ObjectsUnavailable."""
        return await self._read(names.chunk(job, number), ChunkResult)

    async def end_if_done(self, job: Job) -> bool:
        """End a job whose chunks all have results. Raises: ObjectsUnavailable, JobStoreUnavailable."""
        if job.in_progress_s is None:
            return False
        results = await self.store.progress(job.id)
        if len(results) < job.chunks or job.id in self._ending:
            return False
        self._ending.add(job.id)
        try:
            await self._end_done(job, results)
        finally:
            self._ending.discard(job.id)
        return True

    async def _end_done(self, job: Job, results: dict[int, ChunkResult]) -> None:
        final = await self._read(names.final(job.id), FinalRecord)
        if final is None:
            final = self._final_of(await self._latest(job), results)
            await self.store.put(job_row(msgspec.structs.replace(final.job, status="finalizing")))
        await self._end(final)

    def _final_of(self, job: Job, results: dict[int, ChunkResult]) -> FinalRecord:
        counts, ordered = Counts(), sorted(results.items())
        sizes: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for _, result in ordered:
            counts = counts.plus(result.counts)
            for part in PARTS:
                sizes[part] += result.sizes[part]
        parts = {
            part: tuple(
                names.result(job.id, number, result.attempt, part)
                for number, result in ordered
                if result.sizes[part]
            )
            for part in PARTS
        }
        return FinalRecord(ended(job, counts, sizes, self.now_s()), parts, sizes)

    async def _end(self, final: FinalRecord) -> None:
        """Record the end of a job, and add its files of results."""
        name = names.final(final.job.id)
        is_first = await self.objects.create(name, msgspec.json.encode(final))
        if not is_first:
            final = await self._read(name, FinalRecord) or final
        for part in PARTS:
            if final.sizes.get(part):
                record = self.result_file(final, part)
                await self.objects.create(names.record_of_file(record.id), msgspec.json.encode(record))
                await self.store.put(file_row(record))
        await self.store.put(job_row(final.job))
        await self._drop_chunks(final.job)
        if is_first:
            self._report(final.job)

    async def forget(self, job: Job) -> None:
        """Remove the rows of a job whose objects are gone. Raises: JobStoreUnavailable."""
        await self._drop_chunks(job)
        await self.store.remove(job.id)

    async def _drop_chunks(self, job: Job) -> None:
        for number in range(job.chunks):
            # Their bytes are those of the files of results now.
            await self.store.remove(names.chunk_row(job.id, number))
        await self.store.drop(job.id)

    def result_file(self, final: FinalRecord, part: Part) -> FileRecord:
        """Return the record of a job's file of results."""
        job = final.job
        ended_s = job.ended_s or self.now_s()
        word = "output" if part == "out" else "error"
        return FileRecord(
            result_file_id(job.id, part),
            job.tenant,
            f"{job.id}_{word}.jsonl",
            "batch_output",
            final.sizes[part],
            ended_s,
            ended_s + job.keep_s,
            job.id,
            part,
        )

    async def requeue(self, job: Job) -> None:
        """Put the chunks of a job that have no result into the queue, which has lost them.

        Raises: ObjectsUnavailable, JobStoreUnavailable.
        """
        plan = await self.plan_of(job.id)
        if plan is None:
            await self.store.enqueue(job.id, [VALIDATION])
            return
        marks = await self.objects.names(names.chunks(job.id))
        finished: set[int] = set()
        for start in range(0, len(marks), READS_AT_ONCE):
            part = marks[start : start + READS_AT_ONCE]
            found = await asyncio.gather(*(self._read(name, ChunkResult) for name in part))
            for name, result in zip(part, found, strict=True):
                if result is not None:
                    number = int(name.rpartition("/")[2].removesuffix(".json"))
                    await self.store.put(self.chunk_row(job, number, sum(result.sizes.values())))
                    await self.record_chunk(job, number, result)
                    finished.add(number)
        missing = [number for number in range(len(plan.chunks)) if number not in finished]
        await self.store.enqueue(job.id, missing)

    async def record_chunk(self, job: Job, number: int, result: ChunkResult) -> None:
        """Count the stored result of a chunk, and take it off the queue. Raises: JobStoreUnavailable."""
        await self.store.finish(job.id, number, result)

    def chunk_row(self, job: Job, number: int, size: int) -> Row:
        """Return the row that counts the bytes of a chunk's results until the job ends."""
        at_ms = round(job.created_s * 1000)
        id_ = names.chunk_row(job.id, number)
        return Row("file", id_, job.tenant, at_ms, size, is_shown=False, is_active=False, data="{}")

    async def rebuild(self, job: str) -> Job | None:
        """Return a job as its objects describe it, None if there is no such job.

        Raises: ObjectsUnavailable.
        """
        final = await self._read(names.final(job), FinalRecord)
        if final is not None:
            return final.job
        created = await self._read(names.created(job), Job)
        return None if created is None else await self._latest(created)

    async def _latest(self, job: Job) -> Job:
        """Return a job with the marks of its plan and its cancellation."""
        plan = await self.plan_of(job.id)
        if plan is not None:
            job = planned(job, plan)
        moment = await self._read(names.cancellation(job.id), Moment)
        return job if moment is None or job.status == "failed" else cancelling(job, moment)

    async def _with_counts(self, job: Job) -> Job:
        if job.status in TERMINAL or not job.total:
            return job
        counts = Counts()
        for result in (await self.store.progress(job.id)).values():
            counts = counts.plus(result.counts)
        return msgspec.structs.replace(job, counts=counts)

    async def _read(self, name: str, kind: type[Result]) -> Result | None:
        data = await self.objects.read(name)
        return None if data is None else msgspec.json.decode(data, type=kind)

    def _report(self, job: Job) -> None:
        self.changed.set()
        counts = job.counts
        self._observe(BatchChanged(job.id, job.tenant, job.status, counts.completed, counts.failed))
