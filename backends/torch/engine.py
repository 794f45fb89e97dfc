"""One model's work: schedule → run → resolve, forward passes on the threads that compute.

Engines of several models share those threads and take turns. Tokenizing happens on other threads before work
enters the queue, but for a few words. Knows nothing of HTTP.
Invariant: only threads that compute touch the head; only the event loop touches futures.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch

from backends.contract import (
    Detokenize,
    DetokenizeReply,
    Embed,
    Output,
    Reply,
    Tokenize,
    TokenizeReply,
    Work,
    inputs_of,
    operation_of,
)
from backends.errors import BackendError, InvalidWork, ReplicaFailed, ReplicaOverloaded, UnsupportedWork
from backends.texts import INLINE_CHARACTERS_MAX
from backends.torch.answering import answer
from backends.torch.loader import Loaded
from backends.torch.memory import give_back, is_exhausted
from backends.torch.planner import plan
from backends.torch.preparing import Prepared
from backends.torch.sequences import Row
from backends.torch.stats import Recorder, Watch
from backends.torch.threads import ForwardThreads

logger = logging.getLogger(__name__)

# Two keep the queues filled while one waits for the GIL; more only take cores from the forward.
TOKENIZING = ThreadPoolExecutor(2, "tokenize")
# However little memory there is, a forward is planned for this much.
BATCH_TOKENS_LEAST = 64
# Less than this is not shared out: a pass over little is done sooner by a team.
PART_TOKENS_LEAST = 64
# How many forwards' worth of waiting work is sorted by length together.
FORWARDS_AHEAD = 2


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


class Batch(NamedTuple):
    """What one forward pass takes, and what is read off its end."""

    members: Sequence[Member]
    outputs: frozenset[Output]

    @property
    def tokens(self) -> int:
        """Of all its sequences."""
        return _tokens(self.members)


class Engine:
    """One loaded checkpoint with a bounded queue in front of it.

    batch_tokens: tokens of one forward; less from when so many did not fit into memory. queue_tokens: the
    bound; past it work is refused. threads: where it computes, in turns with others.
    relieve: frees what memory it can, called there when a forward has run out of it. recorder: counts what it
    does, for as long as the process lives.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        batch_tokens: int,
        queue_tokens: int,
        threads: ForwardThreads | None = None,
        relieve: Callable[[], None] = give_back,
        recorder: Recorder | None = None,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.out_of_memory = 0
        self._loaded = loaded
        self._queue_tokens = queue_tokens
        self._queued_tokens = 0
        self._queue: deque[Job] = deque()
        self._planned: deque[Batch] = deque()
        # Guards the queue, what is planned, what jobs lack, how many turns are asked for or taken,
        # and whether one has yet to begin.
        self._lock = Lock()
        self._turns = 0
        self._is_due = False
        self._threads = threads or ForwardThreads(torch.device("cpu"))
        self._turns_most = self._threads.count if loaded.reentrant else 1
        self._relieve = relieve
        self.recorder = recorder or Recorder()

    @property
    def waiting_inputs(self) -> int:
        """Inputs in the queue, not yet begun."""
        with self._lock:
            return sum(len(job.rows) for job in self._queue)

    async def run(self, work: Work, watch: Watch | None = None) -> Reply:
        """Carry out one piece of work. watch: told where its time went.

        Raises: InvalidWork, UnsupportedWork, ReplicaOverloaded, ReplicaFailed.
        """
        if operation_of(work) not in self._loaded.capabilities.operations:
            raise UnsupportedWork(f"this model does not {operation_of(work).value}")
        if not inputs_of(work):
            raise InvalidWork("there are no inputs")
        loop = asyncio.get_running_loop()
        if isinstance(work, Tokenize | Detokenize):
            return await loop.run_in_executor(TOKENIZING, self._translate, work)
        if isinstance(work, Embed) and self._characters(work) <= INLINE_CHARACTERS_MAX:
            prepared = self._loaded.preparer.prepare(work)
        else:
            prepared = await loop.run_in_executor(TOKENIZING, self._loaded.preparer.prepare, work)
        job = Job(prepared)
        self._enqueue(job)
        await job.done
        if watch is not None:
            watch.note(job.tokenized_s, job.began_s, job.ended_s, [len(one.ids) for one in job.sequences])
        rows = [row for row in job.rows if row is not None]
        if not prepared.compared:
            return answer(self._loaded.recipe, work, prepared, rows)
        # Comparing takes milliseconds, in which the event loop would answer nobody.
        return await loop.run_in_executor(TOKENIZING, answer, self._loaded.recipe, work, prepared, rows)

    def _characters(self, work: Embed) -> int:
        """At most, with the longest prompt before each input."""
        prompts = self._loaded.recipe.prompts.values()
        return sum(map(len, work.inputs)) + len(work.inputs) * max(map(len, prompts), default=0)

    def _translate(self, work: Tokenize | Detokenize) -> Reply:
        """What the tokenizer does alone."""
        preparer = self._loaded.preparer
        tokenizer = preparer.tokenizer
        if isinstance(work, Detokenize):
            texts = tokenizer.decode(work.inputs, skip_special_tokens=work.skip_special_tokens)
            return DetokenizeReply(tuple(texts))
        explained = tokenizer.explain(preparer.prompted(work), add_special_tokens=work.add_special_tokens)
        return TokenizeReply(tuple(tuple(tokens) for tokens in explained))

    def _enqueue(self, job: Job) -> None:
        with self._lock:
            if self._queue and self._queued_tokens + job.tokens > self._queue_tokens:
                raise ReplicaOverloaded("the engine's queue is full")
            self._queue.append(job)
            self._queued_tokens += job.tokens
            self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        """One more, if fewer are taken than can be at once; one that has yet to begin finds what is there."""
        if self._turns < self._turns_most and not self._is_due:
            self._turns += 1
            self._is_due = True
            self._threads.enter(self._turn)

    def _turn(self) -> bool:
        """One forward pass; then whoever else waits for a thread goes first. False: nothing is left."""
        with self._lock:
            self._is_due = False
            batch = self._next()
            if batch is None:
                self._turns -= 1
                return False
            self.recorder.batch(len(batch.members), batch.tokens)
            if self._planned or self._queue:
                self._ask_for_turn()
        self._threads.take_cores()
        self._forward(batch)
        return True

    def _next(self) -> Batch | None:
        while not self._planned and (jobs := self._schedule()):
            try:
                self._planned.extend(list(self._batches(jobs)))
            except Exception:
                logger.exception("batches could not be planned")
                _break(jobs)
        return self._planned.popleft() if self._planned else None

    def _schedule(self) -> list[Job]:
        """Take jobs in order, enough for a few forwards.

        More than one forward's worth, because likes can then share one.
        """
        jobs: list[Job] = []
        tokens, most = 0, self.batch_tokens * FORWARDS_AHEAD
        while self._queue and (not jobs or tokens + self._queue[0].tokens <= most):
            job = self._queue.popleft()
            self._queued_tokens -= job.tokens
            if not job.done.cancelled():
                job.began_s = perf_counter()
                jobs.append(job)
                tokens += job.tokens
        return jobs

    def _batches(self, jobs: Sequence[Job]) -> Iterator[Batch]:
        for outputs in {job.outputs for job in jobs}:
            alike = [(job, i) for job in jobs if job.outputs == outputs for i in range(job.missing)]
            lengths = [len(job.sequences[i].ids) for job, i in alike]
            most = self.batch_tokens if self._turns_most == 1 else min(self.batch_tokens, self._part(lengths))
            for batch in plan(lengths, most, packed=self._loaded.packed):
                yield Batch([alike[index] for index in batch], outputs)

    def _part(self, lengths: Sequence[int]) -> int:
        """Tokens of each of two passes, as alike as lengths allow; the second has room for the rest."""
        return max(PART_TOKENS_LEAST, (sum(lengths) + max(lengths)) // self._turns_most + 1)

    def _forward(self, batch: Batch) -> None:
        jobs = {job for job, _ in batch.members}
        try:
            self._compute(batch.members, batch.outputs)
        except Exception:
            # Whoever waits for these hears of it, and the engine goes on.
            logger.exception("a turn broke")
            _break(jobs)
        for job in jobs:
            # What is done leaves at once, while the next forward runs.
            if job.missing == 0:
                job.resolve()

    def _compute(self, members: Sequence[Member], outputs: frozenset[Output]) -> None:
        """Give every member its row. If together they fail, halves are tried until the guilty are alone."""
        failed = self._run(members, outputs)
        if failed is None:
            return
        if is_exhausted(failed):
            self._out_of_memory(members)
        if len(members) > 1:
            half = len(members) // 2
            self._compute(members[:half], outputs)
            self._compute(members[half:], outputs)
        elif not is_exhausted(failed) or (failed := self._run(members, outputs)) is not None:
            self._fail(members[0], failed)

    def _out_of_memory(self, members: Sequence[Member]) -> None:
        """Make room, and plan smaller from now on: what did not fit once will not the next time."""
        tokens = _tokens(members)
        self.out_of_memory += 1
        if len(members) > 1:
            self.batch_tokens = min(self.batch_tokens, max(tokens // 2, BATCH_TOKENS_LEAST))
        logger.warning(
            "a forward pass of %d tokens found no memory; from now on %d", tokens, self.batch_tokens
        )
        self._relieve()

    def _run(self, members: Sequence[Member], outputs: frozenset[Output]) -> Exception | None:
        """Why nothing was computed; None where every member has its row."""
        try:
            rows = self._loaded.head.run([job.sequences[i] for job, i in members], outputs)
        except Exception as error:  # noqa: BLE001 - someone waits for each of these, whatever went wrong
            # Its frames hold what the pass had computed so far: memory, where that is what is missing.
            return error.with_traceback(None) if is_exhausted(error) else error
        for (job, place), row in zip(members, rows, strict=True):
            if not row.is_finite():
                job.error = ReplicaFailed(f"the model gave no finite numbers for input {place}")
        with self._lock:
            for (job, place), row in zip(members, rows, strict=True):
                job.give(place, row)
        return None

    def _fail(self, member: Member, failed: Exception) -> None:
        job, place = member
        job.error = _failure(member, failed)
        with self._lock:
            job.give(place, None)


def _break(jobs: Iterable[Job]) -> None:
    """Tell whoever waits for these that nothing more comes."""
    for job in jobs:
        job.error = job.error or ReplicaFailed("the engine broke")
        job.resolve()


def _tokens(members: Sequence[Member]) -> int:
    return sum(len(job.sequences[i].ids) for job, i in members)


def _failure(member: Member, failed: Exception) -> ReplicaFailed:
    job, place = member
    if is_exhausted(failed):
        tokens = len(job.sequences[place].ids)
        return ReplicaFailed(f"there is not enough memory for input {place}, of {tokens} tokens, even alone")
    logger.error("a forward pass failed", exc_info=failed)
    return ReplicaFailed(f"the model failed: {type(failed).__name__}")
