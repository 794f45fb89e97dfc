"""Runner of one process: claims chunks of all jobs in turn and runs them, and ends jobs that are done."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from gateway.batches.chunk_run import ChunkRun, RunningJob, RunParts
from gateway.batches.job_store import RENEW_S, VALIDATION, JobStoreUnavailable, job_of
from gateway.batches.lifecycle import Lifecycle
from gateway.batches.lines import LineRules
from gateway.batches.objects import ObjectsUnavailable
from gateway.batches.patience import Stopped
from gateway.batches.records import Job, LineProblem, Plan
from gateway.config.schema import BatchesSettings

# How soon this process learns of jobs that others have created or cancelled.
LOOK_EVERY_S = 1.0
# Chunks of which a process runs lines: more would only wait for permits, and each is in memory.
CHUNKS_MAX = 16
CHUNKS_PER_JOB = 4
CHUNK_BYTES_MAX = 64 * 1024 * 1024
# Plans in memory, each of some hundred kilobytes at most.
PLANS_MAX = 16
STOP_S = 3.0
FAILURE_PAUSE_S = 2.0

logger = logging.getLogger("gateway")


class Runner:
    """Runs the chunks of jobs in this process."""

    def __init__(self, settings: BatchesSettings, parts: RunParts) -> None:
        self._settings = settings
        self._parts = parts
        self._owner = secrets.token_hex(8)
        self._running: dict[str, RunningJob] = {}
        self._plans: dict[str, Plan] = {}
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
            while await self._begin_next():
                pass
        except (JobStoreUnavailable, ObjectsUnavailable) as error:
            logger.warning("batches wait: %s", error)
            await asyncio.sleep(FAILURE_PAUSE_S)

    def _follow(self, jobs: list[Job]) -> None:
        now_s = self._lifecycle.jobs.now_s()
        for job in jobs:
            running = self._running.setdefault(job.id, RunningJob(job))
            running.job = job
            if running.stop_code(now_s) is not None:
                running.stop.set()
        current = {job.id for job in jobs}
        for id_ in [id_ for id_, running in self._running.items() if not running.open_chunks]:
            if id_ not in current:
                del self._running[id_]
                self._plans.pop(id_, None)

    async def _begin_next(self) -> bool:
        """Begin a chunk of the job that waits most; return whether there was one.

        Raises: JobStoreUnavailable, ObjectsUnavailable.
        """
        if len(self._tasks) >= CHUNKS_MAX or self._open_bytes >= CHUNK_BYTES_MAX:
            return False
        for running in self._by_need():
            number = await self._lifecycle.queue.claim(running.job.id, self._owner)
            if number is None or number in running.open_chunks:
                continue
            running.open_chunks.add(number)
            task = asyncio.create_task(self._run(running, number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._lifecycle.jobs.changed.set())
            return True
        return False

    def _by_need(self) -> list[RunningJob]:
        """Return the jobs that may begin a chunk: first those whose tenant has the fewest."""
        now_s = asyncio.get_running_loop().time()
        of_tenant: Counter[str] = Counter()
        for running in self._running.values():
            of_tenant[running.job.tenant] += len(running.open_chunks)
        ready = [
            running
            for running in self._running.values()
            if len(running.open_chunks) < CHUNKS_PER_JOB
            and (running.blocked_until_s <= now_s or running.stop.is_set())
        ]
        return sorted(
            ready,
            key=lambda running: (
                of_tenant[running.job.tenant],
                len(running.open_chunks),
                running.job.created_s,
            ),
        )

    async def _run(self, running: RunningJob, number: int) -> None:
        """Run one chunk, or the validation of the input."""
        job = running.job
        work = self._validate(job) if number == VALIDATION else self._run_chunk(running, number)
        try:
            await self._guarded(job, work)
        except (Stopped, JobStoreUnavailable, ObjectsUnavailable):
            with suppress(JobStoreUnavailable):
                await self._lifecycle.queue.release(job.id, number, self._owner)
        finally:
            running.open_chunks.discard(number)

    async def _guarded(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (Stopped, asyncio.CancelledError):
            raise
        except (JobStoreUnavailable, ObjectsUnavailable) as error:
            logger.warning("batch %s waits: %s", job.id, error)
            await asyncio.sleep(FAILURE_PAUSE_S)
            raise
        except Exception:
            # Another attempt follows when the lease is over.
            logger.exception("a part of batch %s failed", job.id)

    async def _validate(self, job: Job) -> None:
        settings, server = self._settings, self._parts.server
        rules = LineRules(job.endpoint, settings.lines, settings.line_bytes)

        def check_model(model: str | None) -> LineProblem | None:
            return server.check_model(job.tenant, job.key, job.endpoint, model)

        await self._lifecycle.validate(job, rules, check_model)

    async def _run_chunk(self, running: RunningJob, number: int) -> None:
        job = running.job
        result = await self._lifecycle.jobs.objects.result(job.id, number)
        if result is not None:
            # Its gateway was killed before it could report it.
            await self._lifecycle.finish_chunk(job, number, result)
            return
        chunk = (await self._plan_of(job.id)).chunks[number]
        self._open_bytes += chunk.length
        try:
            await ChunkRun(self._parts, running, number, chunk).run()
        finally:
            self._open_bytes -= chunk.length

    async def _plan_of(self, job: str) -> Plan:
        plan = self._plans.get(job)
        if plan is None:
            plan = await self._lifecycle.jobs.objects.plan(job)
            if plan is None:
                raise ObjectsUnavailable("the plan of a batch is missing")
            while len(self._plans) >= PLANS_MAX:
                self._plans.pop(next(iter(self._plans)))
            self._plans[job] = plan
        return plan

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
