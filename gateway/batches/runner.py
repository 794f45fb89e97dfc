"""Runner of one process: claims chunks of all jobs in turn and runs them, and ends jobs that are done."""

import asyncio
import logging
import secrets
from collections.abc import Iterable
from contextlib import suppress

from gateway.batches.chunk_run import FAILURES_MAX, ChunkRun, RunParts
from gateway.batches.job_objects import JobObjects
from gateway.batches.job_store import RENEW_S, VALIDATION, JobStoreUnavailable, job_of
from gateway.batches.lifecycle import Lifecycle
from gateway.batches.lines import LineRules
from gateway.batches.objects import ObjectLost, ObjectsUnavailable
from gateway.batches.patience import Postponed, Stopped
from gateway.batches.records import Job, LineProblem, Plan
from gateway.batches.running_job import RunningJob, Tries, store_waits
from gateway.batches.slots import Slot, Slots
from gateway.config.schema import BatchesSettings

# How soon this process learns of jobs that others have created or cancelled.
LOOK_EVERY_S = 1.0
CHUNK_BYTES_MAX = 64 * 1024 * 1024
# Plans in memory, each of some hundred kilobytes at most.
PLANS_MAX = 16
STOP_S = 3.0
FAILURE_PAUSE_S = 2.0

logger = logging.getLogger("gateway")


class Plans:
    """Plans of jobs that run."""

    def __init__(self, objects: JobObjects) -> None:
        self._objects = objects
        self._plans: dict[str, Plan] = {}

    async def of(self, job: str) -> Plan:
        """Return the plan of a job. Raises: ObjectLost, ObjectsUnavailable."""
        plan = self._plans.get(job)
        if plan is None:
            plan = await self._objects.plan(job)
            if plan is None:
                raise ObjectLost
            while len(self._plans) >= PLANS_MAX:
                self._plans.pop(next(iter(self._plans)))
            self._plans[job] = plan
        return plan

    def forget(self, job: str) -> None:
        """Drop the plan of a job."""
        self._plans.pop(job, None)


def by_need(jobs: Iterable[RunningJob], slots: Slots) -> list[RunningJob]:
    """Return the jobs that may begin a chunk: first those whose tenant has the fewest.

    Of a tenant's jobs those come first that were stopped, whose lines take no time.
    """
    ready = [running for running in jobs if running.blocked_s <= 0 or running.stop.is_set()]
    needs = {running.job.tenant: slots.need(running.job.tenant) for running in ready}
    return sorted(
        ready,
        key=lambda running: (
            *needs[running.job.tenant],
            not running.stop.is_set(),
            len(running.open_chunks),
            running.job.created_s,
        ),
    )


class Runner:
    """Runs the chunks of jobs in this process."""

    def __init__(self, settings: BatchesSettings, parts: RunParts) -> None:
        self._settings = settings
        self._parts = parts
        self._owner = secrets.token_hex(8)
        self._running: dict[str, RunningJob] = {}
        self._plans = Plans(parts.lifecycle.jobs.objects)
        self._slots = Slots()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_bytes = 0

    @property
    def _lifecycle(self) -> Lifecycle:
        return self._parts.lifecycle

    async def run(self) -> None:
        """Run chunks until cancelled; the lines that run then may end."""
        renewing = asyncio.create_task(self._renew_forever())
        try:
            while True:
                self._lifecycle.jobs.changed.clear()
                await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._lifecycle.jobs.changed.wait()
        finally:
            await self._stop()
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _stop(self) -> None:
        self._parts.stopping.set()
        for running in self._running.values():
            running.stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for running in self._running.values():
            for number in running.open_chunks:
                with suppress(JobStoreUnavailable):
                    await self._lifecycle.queue.release(running.job.id, number, self._owner)

    async def _look(self) -> None:
        """Follow the jobs that have not ended, and begin chunks."""
        if self._parts.server.is_draining():
            self._parts.stopping.set()
            return
        try:
            self._follow([job_of(row) for row in await self._lifecycle.table.active()])
            await self._wake_stopped()
            await store_waits(list(self._running.values()), self._lifecycle.waits)
            while await self._begin_next():
                pass
            for slot in self._slots.to_give_back(asyncio.get_running_loop().time()):
                self._running[slot.job].tries[slot.number].gives_way.set()
        except (JobStoreUnavailable, ObjectsUnavailable) as error:
            logger.warning("batches wait: %s", error)
            await asyncio.sleep(FAILURE_PAUSE_S)

    def _follow(self, jobs: list[Job]) -> None:
        now_s = self._lifecycle.jobs.now_s()
        for job in jobs:
            running = self._running.setdefault(job.id, RunningJob(job))
            running.job = job
            if not running.stop.is_set() and (code := running.stop_code(now_s)) is not None:
                running.stopped_as = code
                running.stop.set()
                self._parts.permits.stop(job.id)
        current = {job.id for job in jobs}
        for id_ in [id_ for id_, running in self._running.items() if not running.open_chunks]:
            if id_ not in current:
                del self._running[id_]
                self._plans.forget(id_)

    async def _wake_stopped(self) -> None:
        """Let the chunks of jobs that have been stopped rest no longer. Raises: JobStoreUnavailable."""
        now_s = asyncio.get_running_loop().time()
        for running in self._running.values():
            # Once: a chunk that fails for another reason rests as those of any job.
            is_stopped = running.stop.is_set() and not running.is_woken
            running.is_woken = running.stop.is_set()
            for number in [n for n, until_s in running.resting.items() if is_stopped or until_s <= now_s]:
                if is_stopped:
                    await self._lifecycle.queue.release(running.job.id, number, self._owner)
                del running.resting[number]

    async def _begin_next(self) -> bool:
        """Begin a chunk of the job that waits most; return whether there was one.

        Raises: JobStoreUnavailable, ObjectsUnavailable.
        """
        if self._open_bytes >= CHUNK_BYTES_MAX:
            return False
        for running in by_need(self._running.values(), self._slots):
            job = running.job
            is_stopped = running.stop.is_set()
            if not self._slots.may_take(job.tenant, is_brief=is_stopped or job.in_progress_s is None):
                continue
            number = await self._lifecycle.queue.claim(job.id, self._owner)
            if number is None or number in running.open_chunks:
                continue
            is_brief = is_stopped or number == VALIDATION
            if not self._slots.may_take(job.tenant, is_brief=is_brief):
                # The row of the job is older than its queue.
                await self._lifecycle.queue.release(job.id, number, self._owner)
                continue
            now_s = asyncio.get_running_loop().time()
            self._begin(running, Slot(job.id, number, job.tenant, now_s, is_brief))
            return True
        return False

    def _begin(self, running: RunningJob, slot: Slot) -> None:
        running.open_chunks.add(slot.number)
        running.resting.pop(slot.number, None)
        running.tries.setdefault(slot.number, Tries())
        self._slots.take(slot)
        task = asyncio.create_task(self._run(running, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._lifecycle.jobs.changed.set())

    async def _run(self, running: RunningJob, slot: Slot) -> None:
        """Run one chunk, or the validation of the input, and give back what has not ended."""
        number = slot.number
        tries = running.tries[number]
        try:
            after_s = await self._try(running, number, tries)
            if after_s is None:
                running.tries.pop(number, None)
            else:
                tries.gives_way.clear()
                await self._give_back(running, number, after_s)
        finally:
            running.open_chunks.discard(number)
            self._slots.taken.discard(slot)

    async def _give_back(self, running: RunningJob, number: int, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        with suppress(JobStoreUnavailable):
            # First, or its owner would read that other batches run.
            await store_waits([running], self._lifecycle.waits)
            await self._lifecycle.queue.release(running.job.id, number, self._owner, after_s)
        if after_s:
            running.resting[number] = loop.time() + after_s
        # As soon as it may begin again.
        wait_s = max(after_s, running.blocked_s, 0.0)
        loop.call_later(wait_s, self._lifecycle.jobs.changed.set)

    async def _try(self, running: RunningJob, number: int, tries: Tries) -> float | None:
        """Return None after the work, or the time until another try."""
        job = running.job
        try:
            if number == VALIDATION:
                await self._validate(job, gives_up=tries.failures >= FAILURES_MAX)
            else:
                await self._run_chunk(running, number)
        except Stopped:
            return 0.0
        except Postponed as postponed:
            return postponed.after_s
        except JobStoreUnavailable as error:
            running.explain(str(error), FAILURE_PAUSE_S)
            return FAILURE_PAUSE_S
        except ObjectsUnavailable as error:
            # What is lost does not come back: after a few tries the job goes on without it.
            tries.failures += isinstance(error, ObjectLost)
            pause_s = max(FAILURE_PAUSE_S, tries.pause_s)
            running.explain(f"its files cannot be read or written: {error}", pause_s)
            return pause_s
        except Exception:
            logger.exception("a part of batch %s failed", job.id)
            tries.failures += 1
            running.explain("the gateway failed to run a part of it, and tries again", tries.pause_s)
            return tries.pause_s
        return None

    async def _validate(self, job: Job, *, gives_up: bool) -> None:
        if gives_up:
            await self._lifecycle.fail(job)
            return
        settings, server = self._settings, self._parts.server
        rules = LineRules(job.endpoint, settings.lines, settings.line_bytes)

        def check_model(model: str | None) -> LineProblem | None:
            return server.check_model(job, model)

        await self._lifecycle.validate(job, rules, check_model)

    async def _run_chunk(self, running: RunningJob, number: int) -> None:
        job = running.job
        result = await self._lifecycle.jobs.objects.result(job.id, number)
        if result is not None:
            # Its gateway was killed before it could report it.
            await self._lifecycle.finish_chunk(job, number, result)
            return
        try:
            chunk = (await self._plans.of(job.id)).chunks[number]
        except ObjectLost:
            if running.tries[number].failures < FAILURES_MAX:
                raise
            await self._lifecycle.fail(job)
            return
        self._open_bytes += chunk.length
        try:
            await ChunkRun(self._parts, running, number, chunk).run()
        finally:
            self._open_bytes -= chunk.length

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for running in list(self._running.values()):
                if running.open_chunks:
                    # A lost lease costs a second attempt, whose result is dropped.
                    with suppress(JobStoreUnavailable):
                        await self._lifecycle.queue.renew(
                            running.job.id, list(running.open_chunks), self._owner
                        )
