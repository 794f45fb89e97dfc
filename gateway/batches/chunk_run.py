"""One try at a chunk: run its lines, keep each result at once, store all of them in the end.

Rule: a line ends with exactly one result. Nothing waits here for what may take long: a chunk whose lines
cannot run, or whose results cannot be stored, ends without them, and the next try goes on with its journal.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.batches import names
from gateway.batches.files import storage_full
from gateway.batches.job_store import ByteBounds, StorageFull
from gateway.batches.lifecycle import Lifecycle
from gateway.batches.line_server import LineRequest, LineServer
from gateway.batches.lines import RunLine, split_chunk
from gateway.batches.objects import ObjectLost
from gateway.batches.patience import TRANSIENT, Postponed, Stopped, until_stored
from gateway.batches.permits import LinePermits, Permit
from gateway.batches.records import PARTS, Chunk, ChunkResult, Job, Part
from gateway.batches.result_bytes import ResultBytes
from gateway.batches.results import LineResult, failed, result_of, unexecuted
from gateway.batches.running_job import RunningJob, Tries
from gateway.batches.spool import Journals, Spool
from gateway.errors import GatewayError, QuotaExceeded

# Tries that fail for an unexpected reason; then the lines that are left get an error.
FAILURES_MAX = 5
# A line of an input that is lost, and its id with it.
UNREADABLE = RunLine("", None)
Result = TypeVar("Result")

logger = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class RunParts:
    """Collaborators of all chunks in one process.

    permits: for lines that run. folder: of the journals. stopping: set when the process is about to stop.
    """

    lifecycle: Lifecycle
    server: LineServer
    permits: LinePermits
    folder: Path
    bounds: ByteBounds
    stopping: asyncio.Event


def permit_of(
    running: RunningJob, permits: LinePermits, body: bytes
) -> AbstractAsyncContextManager[Permit | None]:
    """Return the permit of a line. Those of a stopped job need none, and do not wait for others."""
    if running.stop.is_set():
        return nullcontext()
    return permits.one(running.job.tenant, running.job.id, running.estimate(body))


class ChunkRun:
    """One try at one chunk."""

    def __init__(self, parts: RunParts, running: RunningJob, number: int, chunk: Chunk) -> None:
        self._parts = parts
        self._running = running
        self._number = number
        self._chunk = chunk
        self._tries = running.tries.setdefault(number, Tries())
        self._journals = Journals(parts.folder, f"{running.job.id}.{number}")
        self._unwritten: list[tuple[int, LineResult]] = []
        self._writing = asyncio.Lock()
        # Of the last line that might succeed later.
        self._failure = "its lines cannot be run now"
        self._bytes = ResultBytes(parts.lifecycle.table, parts.bounds, running.job, number)

    @property
    def _job(self) -> Job:
        return self._running.job

    async def run(self) -> None:
        """Run the chunk to its end. Raises: Stopped, Postponed, ObjectsUnavailable, JobStoreUnavailable."""
        self._tries.begun += 1
        try:
            await self._run()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            raise self._postponed(f"results cannot be stored: {error.strerror}") from error

    async def _run(self) -> None:
        lines = await self._read()
        spool = await asyncio.to_thread(self._journals.open, self._tries.attempt)
        try:
            self._bytes.used = spool.size
            await self._bytes.count()
            before = len(spool.entries)
            async with asyncio.TaskGroup() as group:
                for index, line in enumerate(lines):
                    if index not in spool.entries:
                        group.create_task(self._run_line(spool, index, line))
            if len(spool.entries) < len(lines):
                # What it has reserved for more is free for others.
                await self._bytes.put(spool.size)
                raise self._unfinished(is_fruitless=len(spool.entries) == before)
            await self._store_result(spool)
        finally:
            spool.close()
        await asyncio.to_thread(self._journals.remove)

    def _unfinished(self, *, is_fruitless: bool) -> Exception:
        """Return why a try ends before its lines have results."""
        if self._parts.stopping.is_set():
            return Stopped()
        if not is_fruitless:
            self._tries.fruitless = 0
        if self._tries.gives_way.is_set() or self._running.blocked_s > 0:
            return Postponed()
        if not is_fruitless:
            return Postponed(self._tries.pause_s)
        return self._postponed(self._failure)

    def _postponed(self, reason: str) -> Postponed:
        postponed = Postponed(self._tries.pause_s)
        self._tries.fruitless += 1
        # Other chunks would fail for the same reason.
        self._running.block(reason)
        return postponed

    async def _read(self) -> list[RunLine]:
        name = names.data_of_file(self._job.input_file)
        blocks = self._parts.lifecycle.objects.stream(name, self._chunk.offset, self._chunk.length)
        try:
            return split_chunk(b"".join([block async for block in blocks]))
        except ObjectLost:
            if self._tries.failures < FAILURES_MAX:
                raise
            return [UNREADABLE] * self._chunk.lines

    async def _run_line(self, spool: Spool, index: int, line: RunLine) -> None:
        """Run a line and keep its result; or end without one if it may not begin now, or might succeed later.

        Lines that run are finished first: they are paid for. Raises: Stopped.
        """
        body = b"" if line.body is None else bytes(line.body)
        async with permit_of(self._running, self._parts.permits, body) as permit:
            if self._parts.stopping.is_set():
                return
            result = self._without_running(line)
            if result is None and permit is not None and await self._may_begin():
                result = await self._try(index, line)
            if result is None:
                return
            if result.is_executed and body:
                self._running.learn(body, len(result.text))
            self._bytes.used += len(result.text)
            if permit is not None:
                self._parts.permits.resize(permit, len(result.text))
            # With the permit: no line is computed whose result would have to wait in memory.
            await self._keep(spool, index, result)

    def _without_running(self, line: RunLine) -> LineResult | None:
        """Return the result of a line that may not begin any more, or cannot."""
        code = self._running.stop_code(self._parts.lifecycle.jobs.now_s())
        if code is not None:
            return unexecuted(line.custom_id, code)
        if line.body is None or self._tries.failures >= FAILURES_MAX:
            return failed(line.custom_id)
        return None

    async def _may_begin(self) -> bool:
        if self._running.blocked_s > 0 or self._tries.gives_way.is_set():
            return False
        try:
            await self._bytes.reserve()
        except StorageFull as error:
            self._running.block(storage_full(self._parts.bounds, error).message)
            return False
        return True

    async def _try(self, index: int, line: RunLine) -> LineResult | None:
        """Return the result of a line, None if another try might have a better one."""
        job = self._job
        id_ = f"{job.id}.{self._chunk.first + index}.{self._tries.begun}"
        try:
            reply = await self._parts.server.serve(LineRequest(id_, job, line.body or msgspec.Raw()))
            self._running.resume()
        except QuotaExceeded as error:
            self._running.block(error.message, float(error.retry_after_s or 1))
            return None
        except GatewayError as error:
            logger.info("batch %s of tenant %s tries a line again: %s", job.id, job.tenant, error.message)
            self._failure = error.message
            return None
        return result_of(line.custom_id, reply)

    async def _keep(self, spool: Spool, index: int, result: LineResult) -> None:
        """Append a result to the journal, together with those that came meanwhile."""
        self._unwritten.append((index, result))
        async with self._writing:
            if self._unwritten:
                batch, self._unwritten = self._unwritten, []
                await self._until_stored(self._bytes.count)
                # First, so that no kill leaves a result that was not paid.
                await self._until_stored(self._parts.server.settle)
                await self._until_stored(lambda: asyncio.to_thread(spool.append, batch))

    async def _store_result(self, spool: Spool) -> None:
        """Store the results of all lines; those of another attempt count if it was first."""
        first = await self._store(spool)
        lifecycle, job, attempt = self._parts.lifecycle, self._job, self._tries.attempt
        if first.attempt != attempt:
            await lifecycle.objects.remove(
                [names.result(job.id, self._number, attempt, part) for part in PARTS]
            )
        await lifecycle.finish_chunk(job, self._number, first)
        if first.attempt != attempt and await lifecycle.jobs.objects.final(job.id) is not None:
            # This try went on after others had ended its job.
            await lifecycle.drop_chunks(job)

    async def _store(self, spool: Spool) -> ChunkResult:
        """Return the result that counts: this one, unless another attempt was first."""
        lifecycle, job, number = self._parts.lifecycle, self._job, self._number
        first = await lifecycle.jobs.objects.result(job.id, number)
        if first is not None:
            return first
        sizes: dict[Part, int] = {part: spool.size_of(part) for part in PARTS}
        await self._bytes.put(sum(sizes.values()))
        for part in [part for part in PARTS if sizes[part]]:
            path = self._journals.path(f"{self._tries.attempt}.{part}")
            await asyncio.to_thread(spool.compose, part, path)
            await lifecycle.objects.add(names.result(job.id, number, self._tries.attempt, part), path)
        own = ChunkResult(self._tries.attempt, spool.counts(), sizes)
        await lifecycle.jobs.objects.create(names.chunk(job.id, number), own)
        return await lifecycle.jobs.objects.result(job.id, number) or own

    async def _until_stored(self, store: Callable[[], Awaitable[Result]]) -> Result:
        return await until_stored(store, self._parts.stopping, self._running.explain)
