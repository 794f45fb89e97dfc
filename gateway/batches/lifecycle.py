"""Steps of a job from its validation to its end. Each may be repeated, by any gateway, at any time.

The objects of a job decide: its plan, the mark of its cancellation, the marks of its chunks and its final
record are each created once, and the first writer wins. Rows in the store follow them.
"""

import asyncio
from contextlib import aclosing

import msgspec

from gateway.batches import names
from gateway.batches.files import Files, storage_full
from gateway.batches.job_store import VALIDATION, JobStore, StorageFull, file_row, job_row
from gateway.batches.jobs import Jobs
from gateway.batches.lines import CheckModel, LineChecker, LineRules
from gateway.batches.records import (
    PARTS,
    ChunkResult,
    Counts,
    FileRecord,
    FinalRecord,
    Job,
    LineProblem,
    Part,
    Plan,
    ended,
    planned,
    result_file_id,
)
from gateway.batches.result_bytes import chunk_row

READS_AT_ONCE = 16
UNREADABLE = LineProblem("internal_error", "the gateway failed to read the input; its log has the reason")
NO_INPUT = LineProblem("input_file_missing", "the input file has been removed", "input_file_id")


class Lifecycle:
    """Steps of the jobs of all tenants. Every method raises ObjectsUnavailable and JobStoreUnavailable."""

    def __init__(self, files: Files, jobs: Jobs, store: JobStore) -> None:
        self.objects = files.objects
        self._files = files
        self.jobs = jobs
        self.table = store.table
        self.queue = store.queue
        self.waits = store.waits
        # Jobs that this process is about to end: several of their chunks may finish at once.
        self._ending: set[str] = set()

    async def validate(self, job: Job, rules: LineRules, check_model: CheckModel) -> None:
        """Read the input, plan its chunks and put them into the queue; or end the job."""
        plan = await self.jobs.objects.plan(job.id)
        if plan is None:
            plan = await self._check_room(job, await self._check_input(job, rules, check_model))
        await self._follow(job, plan)

    async def _check_room(self, job: Job, plan: Plan) -> Plan:
        """Reserve the bytes of the results that a job has at least; without room its plan is to fail."""
        if plan.problems:
            return plan
        bounds = self._files.bounds
        reserved = msgspec.structs.replace(
            job, chunks=len(plan.chunks), unexecuted_bytes=plan.unexecuted_bytes
        )
        try:
            await self.table.put(job_row(reserved), bounds)
        except StorageFull as error:
            message = storage_full(bounds, error).message
            return Plan(self.jobs.now_s(), problems=(LineProblem("storage_full", message),))
        return plan

    async def fail(self, job: Job) -> None:
        """End a job whose validation fails for an unexpected reason, or whose plan is lost."""
        plan = await self.jobs.objects.plan(job.id)
        await self._follow(job, plan or Plan(self.jobs.now_s(), problems=(UNREADABLE,)))

    async def _follow(self, job: Job, plan: Plan) -> None:
        """Create a plan, unless there is one, and follow it."""
        if not await self.jobs.objects.create(names.plan(job.id), plan):
            plan = await self.jobs.objects.plan(job.id) or plan
        job = planned(await self.jobs.objects.latest(job), plan)
        if job.is_over:
            await self.end(FinalRecord(job))
        else:
            await self.queue.enqueue(job.id, range(len(plan.chunks)))
            self.jobs.report(await self.jobs.put_latest(job))
        await self.queue.finish(job.id, VALIDATION, None)

    async def _check_input(self, job: Job, rules: LineRules, check_model: CheckModel) -> Plan:
        checker = LineChecker(rules, check_model)
        if await self.table.get(job.input_file) is None:
            return Plan(self.jobs.now_s(), problems=(NO_INPUT,))
        async with aclosing(self.objects.stream(names.data_of_file(job.input_file))) as blocks:
            async for block in blocks:
                await asyncio.to_thread(checker.feed, block)
                if checker.is_hopeless:
                    break
        return await asyncio.to_thread(checker.finish, self.jobs.now_s())

    async def finish_chunk(self, job: Job, number: int, result: ChunkResult) -> None:
        """Count the stored result of a chunk, and end the job if it was the last one."""
        await self.queue.finish(job.id, number, result)
        await self.end_if_done(job)

    async def end_if_done(self, job: Job) -> bool:
        """End a job whose chunks all have results."""
        if job.in_progress_s is None or job.id in self._ending:
            return False
        if await self.queue.finished(job.id) < job.chunks or job.id in self._ending:
            return False
        self._ending.add(job.id)
        try:
            results = await self.queue.progress(job.id)
            final = await self.jobs.objects.final(job.id)
            if final is None:
                final = self._final_of(await self.jobs.objects.latest(job), results)
                await self.table.put(job_row(msgspec.structs.replace(final.job, status="finalizing")))
            await self.end(final)
        finally:
            self._ending.discard(job.id)
        return True

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
        return FinalRecord(ended(job, counts, sizes, self.jobs.now_s()), parts, sizes)

    async def end(self, final: FinalRecord) -> None:
        """Record the end of a job, and add its files of results."""
        is_first = await self.jobs.objects.create(names.final(final.job.id), final)
        if not is_first:
            final = await self.jobs.objects.final(final.job.id) or final
        for part in PARTS:
            if final.sizes.get(part):
                record = self._result_file(final, part)
                await self.objects.create(names.record_of_file(record.id), msgspec.json.encode(record))
                await self.table.put(file_row(record))
        await self.table.put(job_row(final.job))
        await self.drop_chunks(final.job)
        if is_first:
            self.jobs.report(final.job)

    def _result_file(self, final: FinalRecord, part: Part) -> FileRecord:
        """Return the record of a job's file of results."""
        job = final.job
        ended_s = job.ended_s or self.jobs.now_s()
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
            key=job.key,
            key_mark=job.key_mark,
        )

    async def forget(self, job: Job) -> None:
        """Remove the rows of a job whose objects are gone."""
        await self.drop_chunks(job)
        await self.table.remove(job.id)

    async def drop_chunks(self, job: Job) -> None:
        """Remove what the queue and the table have of a job's chunks."""
        for number in range(job.chunks):
            # Their bytes are those of the files of results now.
            await self.table.remove(names.chunk_row(job.id, number))
        await self.queue.drop(job.id)

    async def requeue(self, job: Job) -> None:
        """Put the chunks of a job that have no result into the queue, which has lost them."""
        plan = await self.jobs.objects.plan(job.id)
        if plan is None:
            await self.queue.enqueue(job.id, [VALIDATION])
            return
        finished = await self.jobs.objects.finished_chunks(job.id)
        for start in range(0, len(finished), READS_AT_ONCE):
            part = finished[start : start + READS_AT_ONCE]
            await asyncio.gather(*(self._count_again(job, number) for number in part))
        missing = sorted({*range(len(plan.chunks))} - {*finished})
        await self.queue.enqueue(job.id, missing)

    async def _count_again(self, job: Job, number: int) -> None:
        result = await self.jobs.objects.result(job.id, number)
        if result is not None:
            await self.table.put(chunk_row(job, number, sum(result.sizes.values())))
            await self.queue.finish(job.id, number, result)
