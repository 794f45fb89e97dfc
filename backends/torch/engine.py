"""The engine's loop: schedule → run → resolve, on one thread that owns the network.

Tokenizing happens on other threads before work enters the queue. Knows nothing of HTTP.
Invariant: only the loop's thread touches the head; only the event loop touches futures.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import TypeAlias, TypeVar

from backends.contract import (
    Detokenize,
    Detokenized,
    Output,
    Reply,
    Tokenize,
    Tokenized,
    Work,
    inputs_of,
    operation_of,
)
from backends.errors import BackendError, Failed, InvalidWork, Overloaded, UnsupportedWork
from backends.torch.answering import answer
from backends.torch.loader import Loaded
from backends.torch.planner import plan
from backends.torch.preparing import Prepared
from backends.torch.sequences import Row
from backends.torch.stats import Recorder, Watch

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Two keep the queue filled while one waits for the GIL; more only take cores from the forward.
TOKENIZING_THREADS = 2
# How many forwards' worth of waiting work is sorted by length together.
FORWARDS_AHEAD = 2


class ForwardThread:
    """The one thread that computes, from loading a model on.

    OpenMP gives every thread that ever computed a team of its own. Two teams are more threads than cores, and
    then each sleeps between any two operations instead of spinning: a short text took twice as long.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        Thread(target=self._run, name="forward", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Have a function run there, after those before it."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def _run(self) -> None:
        while True:
            self._tasks.get()()


class Job:
    """The sequences of one piece of work, on their way to rows."""

    def __init__(self, prepared: Prepared) -> None:
        self.sequences = prepared.sequences
        self.outputs = prepared.outputs
        self.tokens = sum(len(one.ids) for one in prepared.sequences)
        self.rows: list[Row | None] = [None] * len(prepared.sequences)
        self.missing = len(prepared.sequences)
        self.error: BackendError | None = None
        self.tokenized_s = self.began_s = self.ended_s = perf_counter()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def give(self, place: int, row: Row | None) -> None:
        """What one of its sequences became; None is nothing, after `error` was set."""
        self.rows[place] = row
        self.missing -= 1

    def resolve(self) -> None:
        """Tell the waiting caller; called from the loop's thread."""
        self.ended_s = perf_counter()
        self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


# One sequence of a job.
Member: TypeAlias = tuple[Job, int]


class Engine:
    """One loaded checkpoint with a bounded queue in front of it.

    batch_tokens: tokens of one forward. queue_tokens: the bound; past it work is refused.
    thread: where the checkpoint was loaded, from here on the engine's own.
    """

    def __init__(
        self, loaded: Loaded, *, batch_tokens: int, queue_tokens: int, thread: ForwardThread | None = None
    ) -> None:
        self._loaded = loaded
        self._batch_tokens = batch_tokens
        self._queue_tokens = queue_tokens
        self._queued_tokens = 0
        self._queue: deque[Job] = deque()
        self._arrived = Condition()
        self.recorder = Recorder()
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, "tokenize")
        (thread or ForwardThread()).submit(self._loop)

    @property
    def waiting_inputs(self) -> int:
        """Inputs in the queue, not yet begun."""
        with self._arrived:
            return sum(len(job.rows) for job in self._queue)

    async def run(self, work: Work, watch: Watch | None = None) -> Reply:
        """Carry out one piece of work. watch: told where its time went.

        Raises: InvalidWork, UnsupportedWork, Overloaded, Failed.
        """
        if operation_of(work) not in self._loaded.capabilities.operations:
            raise UnsupportedWork(f"this model does not {operation_of(work).value}")
        if not inputs_of(work):
            raise InvalidWork("there are no inputs")
        loop = asyncio.get_running_loop()
        if isinstance(work, Tokenize | Detokenize):
            return await loop.run_in_executor(self._tokenizing, self._translate, work)
        prepared = await loop.run_in_executor(self._tokenizing, self._loaded.preparer.prepare, work)
        job = Job(prepared)
        self._enqueue(job)
        await job.done
        if watch is not None:
            watch.note(job.tokenized_s, job.began_s, job.ended_s, [len(one.ids) for one in job.sequences])
        rows = [row for row in job.rows if row is not None]
        if not prepared.compared:
            return answer(self._loaded.recipe, work, prepared, rows)
        # Comparing takes milliseconds, in which the event loop would answer nobody.
        return await loop.run_in_executor(self._tokenizing, answer, self._loaded.recipe, work, prepared, rows)

    def _translate(self, work: Tokenize | Detokenize) -> Reply:
        """What the tokenizer does alone."""
        preparer = self._loaded.preparer
        tokenizer = preparer.tokenizer
        if isinstance(work, Detokenize):
            texts = tokenizer.detokenize(work.inputs, skip_special_tokens=work.skip_special_tokens)
            return Detokenized(tuple(texts))
        explained = tokenizer.explain(preparer.prompted(work), add_special_tokens=work.add_special_tokens)
        return Tokenized(tuple(tuple(tokens) for tokens in explained))

    def _enqueue(self, job: Job) -> None:
        with self._arrived:
            if self._queue and self._queued_tokens + job.tokens > self._queue_tokens:
                raise Overloaded("the engine's queue is full")
            self._queue.append(job)
            self._queued_tokens += job.tokens
            self._arrived.notify()

    def _loop(self) -> None:
        while True:
            self._forward(self._schedule())

    def _schedule(self) -> list[Job]:
        """Take jobs in order, enough for a few forwards; waits until there is one.

        More than one forward's worth, because likes can then share one.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._queue)
            jobs: list[Job] = []
            tokens, most = 0, self._batch_tokens * FORWARDS_AHEAD
            while self._queue and (not jobs or tokens + self._queue[0].tokens <= most):
                job = self._queue.popleft()
                self._queued_tokens -= job.tokens
                if not job.done.cancelled():
                    job.began_s = perf_counter()
                    jobs.append(job)
                    tokens += job.tokens
            return jobs

    def _forward(self, jobs: Sequence[Job]) -> None:
        for outputs in {job.outputs for job in jobs}:
            alike = [(job, i) for job in jobs if job.outputs == outputs for i in range(job.missing)]
            lengths = [len(job.sequences[i].ids) for job, i in alike]
            for batch in plan(lengths, self._batch_tokens, packed=self._loaded.packed):
                members = [alike[index] for index in batch]
                self.recorder.batch(len(batch), sum(lengths[index] for index in batch))
                self._compute(members, outputs)
                for job in {job for job, _ in members}:
                    # What is done leaves at once, while the next forward runs.
                    if job.missing == 0:
                        job.resolve()

    def _compute(self, members: Sequence[Member], outputs: frozenset[Output]) -> None:
        """Give every member its row. If together they fail, halves are tried until the guilty are alone."""
        try:
            rows = self._loaded.head.run([job.sequences[i] for job, i in members], outputs)
        except Exception as error:
            # Someone waits for each of these, whatever went wrong.
            if len(members) > 1:
                half = len(members) // 2
                self._compute(members[:half], outputs)
                self._compute(members[half:], outputs)
                return
            logger.exception("a forward pass failed")
            ((job, place),) = members
            job.error = Failed(f"the model failed: {type(error).__name__}")
            job.give(place, None)
            return
        for (job, place), row in zip(members, rows, strict=True):
            if not row.is_finite():
                job.error = Failed(f"the model gave no finite numbers for input {place}")
            job.give(place, row)
