"""One attempt at a chunk: run its lines, keep each result at once, store all of them in the end.

Rule: a line ends with exactly one result. A failure that may pass is waited out until the job's window ends;
so is a store or a disk that cannot take a result.
"""

import asyncio
import errno
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.batches import names
from gateway.batches.job_store import ByteBounds, JobStoreUnavailable, StorageFull
from gateway.batches.jobs import Jobs
from gateway.batches.line_server import LineRequest, LineServer
from gateway.batches.lines import RunLine, split_chunk
from gateway.batches.objects import FULL, ObjectsUnavailable
from gateway.batches.records import PARTS, Chunk, ChunkResult, Job, Part
from gateway.batches.results import CANCELLED, EXPIRED, LineReply, LineResult, result_of, unexecuted
from gateway.batches.spool import Spool
from gateway.errors import GatewayError, QuotaExceeded

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 60.0
# Limits may be raised meanwhile.
LIMIT_PAUSE_MAX_S = 60.0
STORE_PAUSE_MIN_S = 0.5
STORE_PAUSE_MAX_S = 15.0
TRANSIENT = FULL | {errno.EIO, errno.EAGAIN, errno.ENFILE, errno.EMFILE}

Result = TypeVar("Result")

logger = logging.getLogger("gateway")


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

    def block(self, retry_after_s: float) -> None:
        """Let all lines wait after one was refused for a spent limit: each of them would ask in vain."""
        now_s = asyncio.get_running_loop().time()
        if self.blocked_until_s > now_s:
            return
        # What lines that run have reserved, but do not use, comes back soon.
        wait_s = min(LIMIT_PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self.refusals, 10), max(retry_after_s, 0.1))
        self.refusals += 1
        self.blocked_until_s = now_s + wait_s

    def stop_code(self, now_s: float) -> str | None:
        """Return why no line may begin any more, None if lines may."""
        if self.job.cancelling_s is not None:
            return CANCELLED
        return EXPIRED if now_s >= self.job.expires_s else None


@dataclass(frozen=True, slots=True)
class RunParts:
    """Collaborators of all chunks in one process.

    permits: for lines that run. folder: of the journals. stopping: set when the process is about to stop.
    """

    jobs: Jobs
    server: LineServer
    permits: asyncio.Semaphore
    folder: Path
    bounds: ByteBounds
    stopping: asyncio.Event


class Stopped(Exception):
    """The process stops; another attempt goes on with the chunk."""


class ChunkRun:
    """One attempt at one chunk."""

    def __init__(self, parts: RunParts, running: RunningJob, number: int, chunk: Chunk) -> None:
        self._parts = parts
        self._running = running
        self._number = number
        self._chunk = chunk
        self._attempt = secrets.token_hex(8)
        self._unwritten: list[tuple[int, LineResult]] = []
        self._writing = asyncio.Lock()
        self._spool: Spool | None = None

    @property
    def _job(self) -> Job:
        return self._running.job

    async def run(self) -> None:
        """Run the chunk to its end. Raises: Stopped, ObjectsUnavailable, JobStoreUnavailable."""
        lines = split_chunk(await self._read())
        spool = await self._until_stored(lambda: asyncio.to_thread(self._open_spool))
        self._spool = spool
        try:
            missing = [index for index in range(len(lines)) if index not in spool.entries]
            async with asyncio.TaskGroup() as group:
                for index in missing:
                    group.create_task(self._run_line(index, lines[index]))
            await self._store_result(spool)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            spool.close()
        await asyncio.to_thread(self._remove_spools)

    async def _read(self) -> bytes:
        name = names.data_of_file(self._job.input_file)
        blocks = self._parts.jobs.objects.stream(name, self._chunk.offset, self._chunk.length)
        return b"".join([block async for block in blocks])

    async def _run_line(self, index: int, line: RunLine) -> None:
        result, failures = None, 0
        while result is None:
            await self._wait_for_limits()
            async with self._parts.permits:
                result = self._unexecuted(line)
                if result is None and not self._is_blocked():
                    result, pause_s = await self._try(index, line, failures)
                    failures += result is None
                else:
                    pause_s = 0.0
                if result is not None:
                    # With the permit: no line is computed whose result would have to wait in memory.
                    await self._keep(index, result)
                    return
            await self._pause(pause_s)

    async def _try(self, index: int, line: RunLine, failures: int) -> tuple[LineResult | None, float]:
        """Return the result of a line, or None and the time until the next try."""
        job, server = self._job, self._parts.server
        id_ = f"{job.id}.{self._chunk.first + index}.{failures}"
        request = LineRequest(id_, job.tenant, job.key, job.endpoint, line.body)
        try:
            reply: LineReply = await server.serve(request)
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
        """Return the result of a line that may not begin any more. Raises: Stopped."""
        if self._parts.stopping.is_set():
            raise Stopped
        code = self._running.stop_code(self._parts.jobs.now_s())
        return None if code is None else unexecuted(line.custom_id, code)

    def _is_blocked(self) -> bool:
        return self._running.blocked_until_s > asyncio.get_running_loop().time()

    async def _wait_for_limits(self) -> None:
        while self._is_blocked() and not self._running.stop.is_set():
            await self._pause(self._running.blocked_until_s - asyncio.get_running_loop().time())

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than the job may run."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._running.stop.wait()
        except TimeoutError:
            return

    async def _keep(self, index: int, result: LineResult) -> None:
        """Append a result to the journal, together with those that came meanwhile."""
        self._unwritten.append((index, result))
        async with self._writing:
            if not self._unwritten:
                return
            batch, self._unwritten = self._unwritten, []
            spool = self._spool
            assert spool is not None
            await self._until_stored(lambda: asyncio.to_thread(spool.append, batch))

    async def _store_result(self, spool: Spool) -> None:
        """Store the results of all lines; those of another attempt count if it was first."""
        jobs, job, number = self._parts.jobs, self._job, self._number
        attempt = self._attempt
        sizes: dict[Part, int] = {part: spool.size_of(part) for part in PARTS}
        result = ChunkResult(attempt, spool.counts(), sizes)
        row = jobs.chunk_row(job, number, sum(sizes.values()))
        mark = names.chunk(job.id, number)

        async def store() -> ChunkResult:
            found = await jobs.objects.read(mark)
            if found is None:
                await jobs.store.put(row, self._parts.bounds)
                for part in [part for part in PARTS if sizes[part]]:
                    path = self._path(f"{attempt}.{part}")
                    await asyncio.to_thread(spool.compose, part, path)
                    await jobs.objects.add(names.result(job.id, number, attempt, part), path)
                if await jobs.objects.create(mark, msgspec.json.encode(result)):
                    return result
                found = await jobs.objects.read(mark)
            assert found is not None
            return msgspec.json.decode(found, type=ChunkResult)

        first = await self._until_stored(store)
        if first.attempt != attempt:
            await jobs.objects.remove([names.result(job.id, number, attempt, part) for part in PARTS])
        await self._until_stored(lambda: jobs.record_chunk(job, number, first))

    async def _until_stored(self, store: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of an action on a store, repeated until the store can take it.

        Raises: Stopped, OSError for a failure that does not pass.
        """
        pause_s = STORE_PAUSE_MIN_S
        while True:
            try:
                return await store()
            except (ObjectsUnavailable, JobStoreUnavailable, StorageFull) as error:
                reason = str(error) or "the storage is full"
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                reason = error.strerror or "the disk failed"
            if self._parts.stopping.is_set():
                raise Stopped
            if pause_s == STORE_PAUSE_MIN_S:
                logger.warning("batch %s waits: %s", self._job.id, reason)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the tries
            pause_s = min(STORE_PAUSE_MAX_S, 2 * pause_s)

    def _open_spool(self) -> Spool:
        """Open a journal that has the results of all earlier attempts. Raises: OSError."""
        self._parts.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        earlier = self._journals()
        spool = Spool(self._path(f"{self._attempt}.journal"))
        for journal in earlier:
            spool.adopt(journal)
        return spool

    def _journals(self) -> list[Path]:
        return sorted(self._parts.folder.glob(f"{self._job.id}.{self._number}.*.journal"))

    def _remove_spools(self) -> None:
        for path in self._journals():
            path.unlink(missing_ok=True)

    def _path(self, end: str) -> Path:
        return self._parts.folder / f"{self._job.id}.{self._number}.{end}"
