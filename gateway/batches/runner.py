"""Runner of one process: claims chunks of all jobs in turn and runs their lines.

`Runner` looks at the jobs that have not ended once a second, and when one has changed. It claims a chunk for
the tenant that has the fewest places, renews the leases of those that it owns, and gives back what cannot go
on. `RunningJob` is what this process knows of a job: until when its lines wait, how large its results are.
`ChunkRun` tries a chunk: it reads the chunk's lines, and runs those that have no result in the journal.
`Results` appends each result to the journal at once, and stores all of them in the end; the mark of the chunk
decides which attempt counts.

Rule: a line ends with exactly one result. A try waits for nothing that may take long: a chunk whose lines
cannot run, or whose results cannot be stored, ends with `Postponed`, and the next try goes on with its
journal.
"""

import asyncio
import errno
import itertools
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec

from gateway.batches.jobs import Jobs
from gateway.batches.journal import Journal, open_journal, remove_journals
from gateway.batches.lines import (
    CANCELLED,
    EXPIRED,
    FAILED,
    LineResult,
    LineRules,
    LineServer,
    RunLine,
    count_inputs,
    result_of,
    split_chunk,
    without_reply,
)
from gateway.batches.objects import FULL, ObjectLost, ObjectsUnavailable, create_record
from gateway.batches.records import (
    CHUNK_MARK,
    CHUNK_RESULTS,
    FILE_DATA,
    PARTS,
    Chunk,
    ChunkResult,
    Job,
    Part,
    Plan,
)
from gateway.batches.shares import ChunkPlace, ChunkPlaces, LinePermits, Permit
from gateway.batches.store import (
    LEASE_S,
    RENEW_S,
    VALIDATION,
    BoundExceeded,
    Bounds,
    chunk_row,
    job_of,
)
from gateway.config.schema import BatchesSettings
from gateway.errors import GatewayError, QuotaExceeded, QuotaUnavailable
from gateway.store.errors import StoreUnavailable

# How soon this process learns of jobs that others have created or cancelled.
LOOK_EVERY_S = 1.0
# Inputs of chunks in memory.
CHUNK_BYTES_MAX = 64 * 1024 * 1024
STOP_S = 3.0
FAILURE_PAUSE_S = 2.0
PAUSE_MIN_S = 0.5
# Limits may be raised meanwhile.
PAUSE_MAX_S = 60.0
STORE_PAUSE_MAX_S = 15.0
TRANSIENT = FULL | {errno.EIO, errno.EAGAIN, errno.ENFILE, errno.EMFILE}
# Tries that fail for an unexpected reason; then the lines that are left get an error.
FAILURES_MAX = 5
# For so long after the end of a wait its reason is shown: until lines have run, or wait again.
SHOWN_S = 3.0
# Of a result, for each input of its line, until the job has had results: a vector of 1,024 numbers as text.
ITEM_BYTES = 16 * 1024
# The estimate follows larger results at once, and smaller ones by this much.
ITEM_BYTES_DECAY = 0.75
# Bytes of results, reserved at a time, before lines run.
RESERVE_BYTES = 1024 * 1024

logger = logging.getLogger("gateway")


class Postponed(Exception):
    """A chunk cannot go on now; another attempt follows, maybe of another process. after_s: how soon."""

    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__()
        self.after_s = after_s


def backoff_s(failures: int, most_s: float) -> float:
    """Return the time until the next try after so many failures in a row."""
    return min(most_s, PAUSE_MIN_S * 2.0 ** min(failures, 10))


def spread() -> float:
    """Return a factor that keeps the tries of several gateways apart."""
    return random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class RunningJob:
    """State of a job in this process.

    stopped_as: why no line may begin any more, whatever later states of the job say; None if lines may. runs:
    of the chunks that this process has claimed, and that it has not seen end.
    """

    def __init__(self, job: Job, jobs: Jobs) -> None:
        self.job = job
        self.stopped_as: str | None = None
        self.runs: dict[int, ChunkRun] = {}
        self._jobs = jobs
        # Kept only while chunks run: it may have some hundred kilobytes.
        self._plan: Plan | None = None
        # The reason why the job waits is in the log.
        self._is_logged = False
        # No line begins before, on the event loop's clock, after so many refusals in a row.
        self._blocked_until_s = 0.0
        self._refusals = 0
        # Of a result, for each input of its line.
        self._item_bytes: float = ITEM_BYTES

    def follow(self, job: Job, now_s: float) -> bool:
        """Take over a newer state of the job; return whether that stops it."""
        self.job = job
        was_stopped = self.stopped_as is not None
        self.stopped_as = self.stop_code(now_s)
        return self.stopped_as is not None and not was_stopped

    def stop_code(self, now_s: float) -> str | None:
        """Return why no line may begin any more, None if lines may."""
        if self.stopped_as is not None:
            return self.stopped_as
        if self.job.cancelling_s is not None:
            return CANCELLED
        return EXPIRED if now_s >= self.job.expires_s else None

    def open_chunks(self) -> list[int]:
        """Return the chunks that run."""
        return [number for number, run in self.runs.items() if run.place is not None]

    def end(self, run: "ChunkRun") -> None:
        """End a try at a chunk."""
        run.place = None
        if not self.open_chunks():
            self._plan = None

    async def plan(self) -> Plan:
        """Return the plan. Raises: ObjectLost, ObjectsUnavailable."""
        plan = self._plan = self._plan or await self._jobs.plan_of(self.job.id)
        if plan is None:
            raise ObjectLost
        return plan

    @property
    def blocked_s(self) -> float:
        """Time until lines may begin again; 0 or less if they may."""
        return self._blocked_until_s - asyncio.get_running_loop().time()

    async def block(self, reason: str, retry_after_s: float = PAUSE_MAX_S) -> None:
        """Let all lines wait after one could not run for a reason that others share."""
        if self.blocked_s > 0:
            return
        # What lines that run have reserved, but do not use, comes back soon.
        wait_s = min(backoff_s(self._refusals, PAUSE_MAX_S), max(retry_after_s, 0.1))
        self._refusals += 1
        self._blocked_until_s = asyncio.get_running_loop().time() + wait_s
        await self.explain(reason, wait_s)

    def resume(self) -> None:
        """Note that a line has run."""
        self._refusals, self._is_logged = 0, False

    async def explain(self, reason: str, wait_s: float) -> None:
        """Store why the job waits, where its owner reads it; and log it, once until a line runs again."""
        if not self._is_logged:
            self._is_logged = True
            logger.warning("batch %s of tenant %s waits: %s", self.job.id, self.job.tenant, reason)
        with suppress(StoreUnavailable):
            await self._jobs.store.put_wait(self.job.id, reason, wait_s + SHOWN_S)

    def estimate(self, inputs: int) -> int:
        """Return how many bytes the result of a line may have."""
        return round(inputs * self._item_bytes)

    def learn(self, inputs: int, result_bytes: int) -> None:
        """Note the size of a result."""
        self._item_bytes = max(result_bytes / inputs, ITEM_BYTES_DECAY * self._item_bytes)


class Runner:
    """Runs the chunks of jobs in this process. folder: of the journals.

    is_stopping: the process is about to stop, and no line begins. Its other public attributes are
    collaborators of `ChunkRun`.
    """

    def __init__(self, settings: BatchesSettings, jobs: Jobs, server: LineServer, folder: Path) -> None:
        self.settings = settings
        self.jobs = jobs
        self.server = server
        self.folder = folder
        self.permits = LinePermits(settings.lines_in_flight, server.calls)
        self.is_stopping = False
        self._store = jobs.store
        self._owner = secrets.token_hex(8)
        self._running: dict[str, RunningJob] = {}
        self._places = ChunkPlaces()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run chunks until cancelled; the lines that run then may end."""
        renewing = asyncio.create_task(self._renew_forever())
        try:
            while True:
                self.jobs.changed.clear()
                await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self.jobs.changed.wait()
        finally:
            await self._stop()
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _stop(self) -> None:
        self.is_stopping = True
        for id_ in self._running:
            self.permits.stop(id_)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        cut = [(id_, number) for id_, running in self._running.items() for number in running.open_chunks()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for id_, number in cut:
            with suppress(StoreUnavailable):
                await self._store.release(id_, number, self._owner)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for running in list(self._running.values()):
                if numbers := running.open_chunks():
                    # A lost lease costs a second attempt, whose result is dropped.
                    with suppress(StoreUnavailable):
                        await self._store.renew(running.job.id, numbers, self._owner)

    async def _look(self) -> None:
        """Follow the jobs that have not ended, and begin chunks."""
        if self.server.is_draining():
            self.is_stopping = True
            return
        try:
            await self._follow([job_of(row) for row in await self._store.active()])
            while await self._begin_next():
                pass
            self._places.ask_back(asyncio.get_running_loop().time())
        except (StoreUnavailable, ObjectsUnavailable) as error:
            logger.warning("batches wait for their store or their files: %s", error)
            await asyncio.sleep(FAILURE_PAUSE_S)

    async def _follow(self, jobs: list[Job]) -> None:
        now_s, loop_s = self.jobs.now_s(), asyncio.get_running_loop().time()
        for job in jobs:
            running = self._running.setdefault(job.id, RunningJob(job, self.jobs))
            if running.follow(job, now_s):
                self.permits.stop(job.id)
                for number in [run.number for run in running.runs.values() if run.rests_until_s > loop_s]:
                    await self._store.release(job.id, number, self._owner)
        current = {job.id for job in jobs}
        for id_ in [id_ for id_, running in self._running.items() if not running.open_chunks()]:
            if id_ not in current:
                del self._running[id_]

    async def _begin_next(self) -> bool:
        """Begin a chunk of the job that waits most; return whether there was one."""
        runs = [run for running in self._running.values() for run in running.runs.values()]
        if sum(run.open_bytes for run in runs) >= CHUNK_BYTES_MAX:
            return False
        for running in self._by_need():
            job = running.job
            is_stopped = running.stopped_as is not None
            if not self._places.may_take(job.tenant, is_brief=is_stopped or job.in_progress_s is None):
                continue
            number = await self._store.claim(job.id, self._owner)
            if number is None or number in running.open_chunks():
                continue
            is_brief = is_stopped or number == VALIDATION
            if not self._places.may_take(job.tenant, is_brief=is_brief):
                # The row of the job is older than its queue.
                await self._store.release(job.id, number, self._owner)
                continue
            run = running.runs.setdefault(number, ChunkRun(self, running, number))
            run.place = self._places.take(job.tenant, asyncio.get_running_loop().time(), is_brief=is_brief)
            task = asyncio.create_task(self._run(running, run, run.place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self.jobs.changed.set())
            return True
        return False

    def _by_need(self) -> list[RunningJob]:
        """Return the jobs that may begin a chunk: first those whose tenant has the fewest.

        Of a tenant's jobs those come first that were stopped, whose lines take no time.
        """
        ready = [
            running
            for running in self._running.values()
            if running.blocked_s <= 0 or running.stopped_as is not None
        ]
        needs = {tenant: self._places.need(tenant) for tenant in {running.job.tenant for running in ready}}
        return sorted(
            ready,
            key=lambda running: (
                *needs[running.job.tenant],
                running.stopped_as is None,
                len(running.open_chunks()),
                running.job.created_s,
            ),
        )

    async def _run(self, running: RunningJob, run: "ChunkRun", place: ChunkPlace) -> None:
        """Try a chunk once, and give it back if it has not ended."""
        loop = asyncio.get_running_loop()
        try:
            after_s = await run.run()
            if after_s is None:
                del running.runs[run.number]
                return
            with suppress(StoreUnavailable):
                await self._store.release(running.job.id, run.number, self._owner, after_s)
            run.rests_until_s = loop.time() + after_s
            # As soon as it may begin again.
            loop.call_later(max(after_s, running.blocked_s, 0.0), self.jobs.changed.set)
        finally:
            running.end(run)
            self._places.give_back(place)


class ChunkRun:
    """Tries of this process at one chunk, or at the validation of the input.

    place: while a try runs. open_bytes: of the input, in memory then. rests_until_s: time until which the
    chunk was given back, on the event loop's clock.
    """

    def __init__(self, runner: Runner, running: RunningJob, number: int) -> None:
        self.number = number
        self.place: ChunkPlace | None = None
        self.open_bytes = 0
        self.rests_until_s = 0.0
        self._runner = runner
        self._running = running
        self._jobs = runner.jobs
        self._name = f"{running.job.id}.{number}"
        # In the names of its journal and its results.
        self._attempt = secrets.token_hex(8)
        # Tries; those in a row without a new result; those that ended for an unexpected reason.
        self._begun = self._fruitless = self._failures = 0
        # Of the last line that might succeed later.
        self._failure = ""

    @property
    def _job(self) -> Job:
        return self._running.job

    @property
    def _gives_up(self) -> bool:
        return self._failures >= FAILURES_MAX

    @property
    def _pause_s(self) -> float:
        """Time until the next try. The queue can hold a chunk back for a lease."""
        return backoff_s(self._fruitless + self._failures, LEASE_S) * spread()

    async def run(self) -> float | None:
        """Try once; return None after the work, or the time until another try."""
        self._begun += 1
        self._failure = "its lines cannot be run now"
        try:
            await (self._validate() if self.number == VALIDATION else self._run_chunk())
        except Postponed as postponed:
            return postponed.after_s
        except StoreUnavailable as error:
            reason, pause_s = f"the store of batches is unavailable: {error}", FAILURE_PAUSE_S
        except ObjectsUnavailable as error:
            # What is lost does not come back: after a few tries the job goes on without it.
            self._failures += isinstance(error, ObjectLost)
            reason = f"its files cannot be read or written: {error}"
            pause_s = max(FAILURE_PAUSE_S, self._pause_s)
        except Exception:
            logger.exception("a part of batch %s failed", self._job.id)
            self._failures += 1
            reason, pause_s = "the gateway failed to run a part of it, and tries again", self._pause_s
        else:
            return None
        await self._running.explain(reason, pause_s)
        return pause_s

    async def _validate(self) -> None:
        job, settings = self._job, self._runner.settings
        if self._gives_up:
            await self._jobs.fail(job)
            return
        rules = LineRules(job.endpoint, settings.lines, settings.line_bytes)
        await self._jobs.validate(job, rules, partial(self._runner.server.check_model, job))

    async def _run_chunk(self) -> None:
        """Run the chunk to its end. Raises: Postponed, ObjectsUnavailable, StoreUnavailable."""
        job, number = self._job, self.number
        result = await self._jobs.result_of(job.id, number)
        if result is not None:
            # Its gateway was killed before it could report it.
            await self._jobs.finish_chunk(job, number, result)
            return
        try:
            chunk = (await self._running.plan()).chunks[number]
        except ObjectLost:
            if not self._gives_up:
                raise
            await self._jobs.fail(job)
            return
        self.open_bytes = chunk.length
        try:
            await self._run_input(chunk)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            raise await self._postponed(f"results cannot be stored: {error.strerror}") from error
        finally:
            self.open_bytes = 0

    async def _run_input(self, chunk: Chunk) -> None:
        lines = await self._read(chunk)
        journal = await asyncio.to_thread(open_journal, self._runner.folder, self._name, self._attempt)
        try:
            results = Results(self._runner, self._running, self.number, journal)
            await self._run_lines(lines, chunk.first, results)
        finally:
            journal.close()
        await asyncio.to_thread(remove_journals, self._runner.folder, self._name)

    async def _read(self, chunk: Chunk) -> list[RunLine]:
        blocks = self._jobs.objects.stream(FILE_DATA.format(self._job.input_file), chunk.offset, chunk.length)
        try:
            return split_chunk(b"".join([block async for block in blocks]))
        except ObjectLost:
            if not self._gives_up:
                raise
            # Their ids are lost, too.
            return [RunLine("", msgspec.Raw())] * chunk.lines

    async def _run_lines(self, lines: list[RunLine], first: int, results: "Results") -> None:
        done = results.journal.entries
        await results.count()
        before = len(done)
        async with asyncio.TaskGroup() as group:
            for index, line in enumerate(lines):
                if index not in done:
                    group.create_task(self._run_line(results, index, line, f"{self._job.id}.{first + index}"))
        if len(done) < len(lines):
            # What it has reserved for more is free for others.
            await results.put(results.journal.size_of(*PARTS))
            raise await self._unfinished(is_fruitless=len(done) == before)
        await self._store_results(results)

    async def _unfinished(self, *, is_fruitless: bool) -> Postponed:
        """Return why a try ends before its lines have results."""
        if self._runner.is_stopping:
            return Postponed()
        if not is_fruitless:
            self._fruitless = 0
        if self._gives_way or self._running.blocked_s > 0:
            return Postponed()
        return await self._postponed(self._failure) if is_fruitless else Postponed(self._pause_s)

    async def _postponed(self, reason: str) -> Postponed:
        postponed = Postponed(self._pause_s)
        self._fruitless += 1
        # Other chunks would fail for the same reason.
        await self._running.block(reason)
        return postponed

    @property
    def _gives_way(self) -> bool:
        return self.place is not None and self.place.gives_way

    async def _run_line(self, results: "Results", index: int, line: RunLine, id_: str) -> None:
        """Run a line and keep its result; or end without one if it may not begin now, or might succeed later.

        Lines that run are finished first: they are paid for. Those of a stopped job need no permit.
        """
        job, permits, inputs = self._job, self._runner.permits, 0
        permitted: AbstractAsyncContextManager[Permit | None] = nullcontext()
        if self._running.stopped_as is None:
            inputs = count_inputs(bytes(line.body))
            permitted = permits.one(job.tenant, job.id, self._running.estimate(inputs))
        async with permitted as permit:
            if self._runner.is_stopping:
                return
            result = self._without_running(line)
            if result is None and permit is not None and await self._may_begin(results):
                result = await self._try(line, f"{id_}.{self._begun}")
            if result is None:
                return
            if result.is_executed and inputs and line.body:
                self._running.learn(inputs, len(result.text))
            if permit is not None:
                permits.resize(permit, len(result.text))
            # With the permit: no line is computed whose result would have to wait in memory.
            await results.keep(index, result)

    def _without_running(self, line: RunLine) -> LineResult | None:
        """Return the result of a line that may not begin any more, or cannot."""
        code = self._running.stop_code(self._jobs.now_s())
        if code is None and (not line.body or self._gives_up):
            code = FAILED
        return None if code is None else without_reply(line.custom_id, code)

    async def _may_begin(self, results: "Results") -> bool:
        if self._running.blocked_s > 0 or self._gives_way:
            return False
        try:
            await results.reserve()
        except BoundExceeded as error:
            await self._running.block(self._jobs.files.refusal(error, "batch").message)
            return False
        return True

    async def _try(self, line: RunLine, id_: str) -> LineResult | None:
        """Return the result of a line, None if another try might have a better one."""
        job = self._job
        try:
            reply = await self._runner.server.serve(job, id_, bytes(line.body))
            self._running.resume()
        except QuotaExceeded as error:
            await self._running.block(error.message, float(error.retry_after_s or 1))
            return None
        except GatewayError as error:
            logger.info("batch %s of tenant %s tries a line again: %s", job.id, job.tenant, error.message)
            self._failure = error.message
            return None
        return result_of(line.custom_id, reply)

    async def _store_results(self, results: "Results") -> None:
        """Store the results of all lines; those of another attempt count if it was first."""
        jobs, job, number, attempt = self._jobs, self._job, self.number, self._attempt
        first = await jobs.result_of(job.id, number)
        if first is None:
            own = await results.store(self._name, attempt)
            await create_record(jobs.objects, CHUNK_MARK.format(job.id, number), own)
            first = await jobs.result_of(job.id, number) or own
        if first.attempt != attempt:
            await jobs.objects.remove([CHUNK_RESULTS.format(job.id, number, attempt, part) for part in PARTS])
        await jobs.finish_chunk(job, number, first)
        if first.attempt != attempt and await jobs.final_of(job.id) is not None:
            # This try went on after others had ended its job.
            await jobs.drop_chunks(job)


class Results:
    """Results of one try at a chunk, in a journal. The store counts their bytes before they are written."""

    def __init__(self, runner: Runner, running: RunningJob, number: int, journal: Journal) -> None:
        self.journal = journal
        self._runner = runner
        self._running = running
        self._number = number
        self._jobs = runner.jobs
        self._reserving, self._writing = asyncio.Lock(), asyncio.Lock()
        self._reserved = 0
        # By results that are there, whether they are written or not.
        self._used = journal.size_of(*PARTS)
        self._unwritten: list[tuple[int, LineResult]] = []

    async def reserve(self) -> None:
        """Reserve room for the result of one more line. Raises: BoundExceeded."""
        async with self._reserving:
            while self._used >= self._reserved:
                try:
                    await self.put(self._used + RESERVE_BYTES, self._jobs.bounds)
                except BoundExceeded:
                    await self.put(self._used + 1, self._jobs.bounds)

    async def count(self) -> None:
        """Count results that are there, even beyond the bounds: they are paid for."""
        if self._used > self._reserved:
            await self.put(self._used)

    async def put(self, size: int, bounds: Bounds | None = None) -> None:
        """Replace what is counted. Raises: BoundExceeded."""
        await self._jobs.store.put(chunk_row(self._running.job, self._number, size), bounds)
        self._reserved = size

    async def keep(self, index: int, result: LineResult) -> None:
        """Append a result to the journal, together with those that came meanwhile.

        Raises: Postponed if the process stops, OSError for a failure that does not pass.
        """
        self._used += len(result.text)
        self._unwritten.append((index, result))
        async with self._writing:
            if self._unwritten:
                results, self._unwritten = self._unwritten, []
                await self._until_stored(self.count)
                # First, so that no kill leaves a result that was not paid.
                await self._until_stored(self._runner.server.settle)
                await self._until_stored(lambda: asyncio.to_thread(self.journal.append, results))

    async def _until_stored(self, store: Callable[[], Awaitable[None]]) -> None:
        """Repeat an action while it fails for reasons that may pass. Raises: as `keep`."""
        for failures in itertools.count():
            try:
                await store()
                return
            except (ObjectsUnavailable, StoreUnavailable, QuotaUnavailable) as error:
                reason = str(error)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                reason = str(error.strerror)
            if self._runner.is_stopping:
                raise Postponed
            pause_s = backoff_s(failures, STORE_PAUSE_MAX_S)
            await self._running.explain(f"results cannot be stored: {reason}", pause_s)
            await asyncio.sleep(pause_s * spread())

    async def store(self, name: str, attempt: str) -> ChunkResult:
        """Store the results of all lines as objects. name: of the files that are made of them meanwhile."""
        journal = self.journal
        sizes: dict[Part, int] = {part: journal.size_of(part) for part in PARTS}
        await self.put(sum(sizes.values()))
        for part in [part for part in PARTS if sizes[part]]:
            path = self._runner.folder / f"{name}.{attempt}.{part}"
            await asyncio.to_thread(journal.compose, part, path)
            object_name = CHUNK_RESULTS.format(self._running.job.id, self._number, attempt, part)
            await self._jobs.objects.add(object_name, path)
        return ChunkResult(attempt, journal.counts(), sizes)
