"""One attempt at a chunk: run its lines, keep each result at once, store all of them in the end.

Rule: a line ends with exactly one result. A failure that may pass is waited out until the job's window ends;
so is a store or a disk that cannot take a result.
"""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gateway.batches import names
from gateway.batches.job_store import ByteBounds
from gateway.batches.lifecycle import Lifecycle, chunk_row
from gateway.batches.line_server import LineRequest, LineServer
from gateway.batches.lines import RunLine, split_chunk
from gateway.batches.patience import Stopped, until_stored
from gateway.batches.permits import LinePermits
from gateway.batches.records import PARTS, Chunk, ChunkResult, Job, Part
from gateway.batches.results import CANCELLED, EXPIRED, LineResult, result_of, unexecuted
from gateway.batches.spool import Journals, Spool
from gateway.errors import GatewayError, QuotaExceeded

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 60.0
# Limits may be raised meanwhile.
LIMIT_PAUSE_MAX_S = 60.0
Result = TypeVar("Result")


@dataclass(slots=True)
class RunningJob:
    """State of a job in this process.

    blocked_until_s: on the event loop's clock; a limit is spent until then. refusals: in a row. stop: set
    when no line may begin.
    """

    job: Job
    blocked_until_s: float = 0.0
    refusals: int = 0
    open_chunks: set[int] = field(default_factory=set)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def blocked_s(self) -> float:
        """Time until lines may ask for room in the limits again; 0 or less if they may."""
        return self.blocked_until_s - asyncio.get_running_loop().time()

    def block(self, retry_after_s: float) -> None:
        """Let all lines wait after one was refused for a spent limit: each of them would ask in vain."""
        if self.blocked_s > 0:
            return
        # What lines that run have reserved, but do not use, comes back soon.
        wait_s = min(LIMIT_PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self.refusals, 10), max(retry_after_s, 0.1))
        self.refusals += 1
        self.blocked_until_s = asyncio.get_running_loop().time() + wait_s

    def stop_code(self, now_s: float) -> str | None:
        """Return why no line may begin any more, None if lines may."""
        if self.job.cancelling_s is not None:
            return CANCELLED
        return EXPIRED if now_s >= self.job.expires_s else None

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than lines may begin."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            return

    async def wait_for_limits(self) -> None:
        """Wait until lines may ask for room in the limits."""
        while (seconds := self.blocked_s) > 0 and not self.stop.is_set():
            await self.pause(seconds)


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


class ChunkRun:
    """One attempt at one chunk."""

    def __init__(self, parts: RunParts, running: RunningJob, number: int, chunk: Chunk) -> None:
        self._parts = parts
        self._running = running
        self._number = number
        self._chunk = chunk
        self._attempt = secrets.token_hex(8)
        self._journals = Journals(parts.folder, f"{running.job.id}.{number}")
        self._unwritten: list[tuple[int, LineResult]] = []
        self._writing = asyncio.Lock()

    @property
    def _job(self) -> Job:
        return self._running.job

    async def run(self) -> None:
        """Run the chunk to its end. Raises: Stopped, ObjectsUnavailable, JobStoreUnavailable."""
        lines = split_chunk(await self._read())
        spool = await self._until_stored(lambda: asyncio.to_thread(self._journals.open, self._attempt))
        try:
            async with asyncio.TaskGroup() as group:
                for index, line in enumerate(lines):
                    if index not in spool.entries:
                        group.create_task(self._run_line(spool, index, line))
            if len(spool.entries) < len(lines):
                raise Stopped
            await self._store_result(spool)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            spool.close()
        await asyncio.to_thread(self._journals.remove)

    async def _read(self) -> bytes:
        name = names.data_of_file(self._job.input_file)
        blocks = self._parts.lifecycle.objects.stream(name, self._chunk.offset, self._chunk.length)
        return b"".join([block async for block in blocks])

    async def _run_line(self, spool: Spool, index: int, line: RunLine) -> None:
        """Run a line until it has a result, and keep that; or end without one if the process stops.

        Lines that run are finished first: they are paid for. Raises: Stopped.
        """
        failures = 0
        while True:
            await self._running.wait_for_limits()
            pause_s = 0.0
            async with self._parts.permits:
                if self._parts.stopping.is_set():
                    return
                result = self._unexecuted(line)
                if result is None and self._running.blocked_s <= 0:
                    result, pause_s = await self._try(index, line, failures)
                    failures += result is None
                if result is not None:
                    # With the permit: no line is computed whose result would have to wait in memory.
                    await self._keep(spool, index, result)
                    return
            await self._running.pause(pause_s)

    async def _try(self, index: int, line: RunLine, failures: int) -> tuple[LineResult | None, float]:
        """Return the result of a line, or None and the time until the next try."""
        job, server = self._job, self._parts.server
        id_ = f"{job.id}.{self._chunk.first + index}.{failures}"
        try:
            reply = await server.serve(LineRequest(id_, job.tenant, job.key, job.endpoint, line.body))
            self._running.refusals = 0
        except QuotaExceeded as error:
            self._running.block(float(error.retry_after_s or 1))
            return None, 0.0
        except GatewayError as error:
            if error.facts.retryable:
                backoff_s = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(failures, 10))
                return None, backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the tries
            reply = server.reply_to(error)
        return result_of(line.custom_id, reply), 0.0

    def _unexecuted(self, line: RunLine) -> LineResult | None:
        """Return the result of a line that may not begin any more."""
        code = self._running.stop_code(self._parts.lifecycle.jobs.now_s())
        return None if code is None else unexecuted(line.custom_id, code)

    async def _keep(self, spool: Spool, index: int, result: LineResult) -> None:
        """Append a result to the journal, together with those that came meanwhile."""
        self._unwritten.append((index, result))
        async with self._writing:
            if self._unwritten:
                batch, self._unwritten = self._unwritten, []
                # First, so that no kill leaves a result that was not paid.
                await self._until_stored(self._parts.server.settle)
                await self._until_stored(lambda: asyncio.to_thread(spool.append, batch))

    async def _store_result(self, spool: Spool) -> None:
        """Store the results of all lines; those of another attempt count if it was first."""
        first = await self._until_stored(lambda: self._store(spool))
        lifecycle, job = self._parts.lifecycle, self._job
        if first.attempt != self._attempt:
            own = [names.result(job.id, self._number, self._attempt, part) for part in PARTS]
            await lifecycle.objects.remove(own)
        await self._until_stored(lambda: lifecycle.finish_chunk(job, self._number, first))

    async def _store(self, spool: Spool) -> ChunkResult:
        """Return the result that counts: this one, unless another attempt was first."""
        lifecycle, job, number = self._parts.lifecycle, self._job, self._number
        first = await lifecycle.jobs.objects.result(job.id, number)
        if first is not None:
            return first
        sizes: dict[Part, int] = {part: spool.size_of(part) for part in PARTS}
        await lifecycle.table.put(chunk_row(job, number, sum(sizes.values())), self._parts.bounds)
        for part in [part for part in PARTS if sizes[part]]:
            path = self._journals.path(f"{self._attempt}.{part}")
            await asyncio.to_thread(spool.compose, part, path)
            await lifecycle.objects.add(names.result(job.id, number, self._attempt, part), path)
        own = ChunkResult(self._attempt, spool.counts(), sizes)
        await lifecycle.jobs.objects.create(names.chunk(job.id, number), own)
        return await lifecycle.jobs.objects.result(job.id, number) or own

    async def _until_stored(self, store: Callable[[], Awaitable[Result]]) -> Result:
        return await until_stored(store, self._parts.stopping, f"batch {self._job.id}")
