"""Engine of one model: schedule → run → resolve, with forward passes on the threads that compute.

Engines of several models share those threads and take turns. Work is tokenized on other threads before it
enters the queue, except for a few words. Knows nothing of HTTP. A pass that fails for want of memory, or for
one of its sequences, is run again in parts.
Invariant: only threads that compute touch the head; only the event loop touches futures.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from time import perf_counter

import torch

from backends.contract import (
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedParts,
    Output,
    Reply,
    Tokenize,
    TokenizeReply,
    Work,
)
from backends.contract.errors import InvalidWork, ReplicaOverloaded, UnsupportedWork
from backends.contract.texts import INLINE_CHARACTERS_MAX
from backends.torch.inputs.sequences import Head, PreparedSequences
from backends.torch.memory import is_exhausted, release_to_system
from backends.torch.passes.answering import answer
from backends.torch.passes.backlog import Backlog
from backends.torch.passes.jobs import Batch, Job, Member, count_tokens, fail_jobs, failure_of, plan
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.passes.threads import ForwardThreads
from backends.torch.stats import Recorder, Stopwatch

logger = logging.getLogger(__name__)

# A forward pass is planned for at least this much, however little memory there is.
BATCH_TOKENS_MIN = 64
NOT_FINITE = "the model gives numbers for it that are not finite"


class BatchRunner:
    """Computes batches with one head.

    lock: guards the jobs' missing rows. batch_tokens: tokens of one pass, reduced when a pass ran out of
    memory. relieve: frees memory after that.
    """

    def __init__(self, head: Head, lock: Lock, batch_tokens: int, relieve: Callable[[], None]) -> None:
        self.batch_tokens = batch_tokens
        self.out_of_memory = 0
        self._head = head
        self._lock = lock
        self._relieve = relieve

    def compute(self, members: Sequence[Member], outputs: frozenset[Output]) -> None:
        """Compute the row of every member; a batch that fails is halved until the faulty inputs are alone.

        So are the members of a batch whose rows are not finite: a masked key with such a number spoils its
        neighbors in a block of sequences.
        """
        error, spoiled = self._run(members, outputs)
        if spoiled:
            self._compute_halves(spoiled, outputs)
        if error is None:
            return
        if is_exhausted(error):
            self._out_of_memory(members)
        if len(members) > 1:
            self._compute_halves(members, outputs)
        elif not is_exhausted(error) or (error := self._run(members, outputs)[0]) is not None:
            self._fail(members[0], error)

    def _compute_halves(self, members: Sequence[Member], outputs: frozenset[Output]) -> None:
        half = len(members) // 2
        for part in filter(None, (members[:half], members[half:])):
            self.compute(part, outputs)

    def _out_of_memory(self, members: Sequence[Member]) -> None:
        """Free memory, and plan smaller passes from now on."""
        tokens = count_tokens(members)
        self.out_of_memory += 1
        if len(members) > 1:
            self.batch_tokens = min(self.batch_tokens, max(tokens // 2, BATCH_TOKENS_MIN))
        logger.warning(
            "a forward pass of %d tokens ran out of memory; from now on the limit is %d",
            tokens,
            self.batch_tokens,
        )
        self._relieve()

    def _run(
        self, members: Sequence[Member], outputs: frozenset[Output]
    ) -> tuple[Exception | None, list[Member]]:
        """Run one pass; return the error if it failed, and the members of several that have no row yet."""
        try:
            rows = self._head.run([job.sequences[i] for job, i in members], outputs)
        except Exception as error:  # noqa: BLE001 - a caller waits for each member, whatever the error
            # The frames of the traceback hold the tensors of the failed pass, and with them the memory.
            return (error.with_traceback(None) if is_exhausted(error) else error), []
        are_finite = [row.is_finite() for row in rows]
        spoiled = []
        with self._lock:
            for member, row, is_finite in zip(members, rows, are_finite, strict=True):
                job, place = member
                if not is_finite and len(members) > 1:
                    spoiled.append(member)
                    continue
                if not is_finite:
                    job.blame(place, NOT_FINITE)
                job.give(place, row)
        return None, spoiled

    def _fail(self, member: Member, error: Exception) -> None:
        job, place = member
        failure = failure_of(member, error)
        with self._lock:
            job.error = job.error or failure
            job.give(place, None)


# Two threads keep the queue filled while one waits for the GIL; more only take cores from the forward pass.
TOKENIZING = ThreadPoolExecutor(2, "tokenize")
# A template may take a second for a conversation that was made for it; texts do not wait for it.
RENDERING = ThreadPoolExecutor(1, "render")
# Less work is not split into two passes: one team finishes a small pass sooner.
PART_TOKENS_MIN = 64
# Waiting work that is sorted by length together, in forward passes.
FORWARDS_AHEAD = 2
# Passes that take the place of one while small jobs come next to large ones: a person may wait for their end.
MIXED_PARTS = 4


class Engine:
    """Loaded checkpoint with bounded queues in front of it: of texts, and of pictures and recordings.

    batch_tokens: tokens of one forward pass. queue_tokens: bound of a queue; work beyond it is refused.
    threads: shared with other engines, in turns. relieve: called on such a thread to free memory after a pass
    ran out of it. recorder: counters that outlive this engine.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        batch_tokens: int,
        queue_tokens: int,
        threads: ForwardThreads | None = None,
        relieve: Callable[[], None] = release_to_system,
        recorder: Recorder | None = None,
    ) -> None:
        self._loaded = loaded
        # Guards the backlogs and the jobs' missing rows.
        self._lock = Lock()
        threads = threads or ForwardThreads(torch.device("cpu"))
        self._texts, self._media = _backlogs(loaded, threads, queue_tokens)
        self._runner = BatchRunner(loaded.head, self._lock, batch_tokens, relieve)
        self.recorder = recorder or Recorder()

    @property
    def batch_tokens(self) -> int:
        """Tokens of one forward pass, reduced when a pass ran out of memory."""
        return self._runner.batch_tokens

    @property
    def out_of_memory(self) -> int:
        """Number of batches that did not fit into memory."""
        return self._runner.out_of_memory

    @property
    def waiting_inputs(self) -> int:
        """Number of inputs in the queue."""
        with self._lock:
            return sum(backlog.waiting_inputs for backlog in {self._texts, self._media})

    async def run(self, work: Work, stopwatch: Stopwatch | None = None) -> Reply:
        """Run one piece of work. stopwatch: records where its time goes.

        Raises: InvalidWork, UnsupportedWork, ReplicaOverloaded, ReplicaFailed.
        """
        if work.operation not in self._loaded.capabilities.operations:
            raise UnsupportedWork(f"this model does not {work.operation.value}")
        if not work.inputs:
            raise InvalidWork("there are no inputs")
        loop = asyncio.get_running_loop()
        if isinstance(work, Tokenize | Detokenize):
            return await loop.run_in_executor(TOKENIZING, self._translate, work)
        prepared = await self._prepare(work)
        job = Job(prepared)
        self._enqueue(job)
        await job.done
        if stopwatch is not None:
            lengths = [sequence.tokens for sequence in job.sequences]
            stopwatch.note(job.tokenized_s, job.began_s, job.ended_s, lengths)
        rows = [row for row in job.rows if row is not None]
        if not prepared.compared:
            return answer(self._loaded.recipe, work, prepared, rows)
        # Comparing takes milliseconds, which would block the event loop.
        return await loop.run_in_executor(TOKENIZING, answer, self._loaded.recipe, work, prepared, rows)

    async def _prepare(self, work: Work) -> PreparedSequences:
        if isinstance(work, EmbedParts):
            assert self._loaded.media is not None
            return await self._loaded.media.prepare(work)
        is_short = isinstance(work, Embed) and _characters(self._loaded, work) <= INLINE_CHARACTERS_MAX
        is_chat = work.conversation is not None
        if is_short and not is_chat:
            return self._loaded.preparer.prepare(work)
        loop = asyncio.get_running_loop()
        threads = RENDERING if is_chat else TOKENIZING
        return await loop.run_in_executor(threads, self._loaded.preparer.prepare, work)

    def _translate(self, work: Tokenize | Detokenize) -> Reply:
        """Do what needs the tokenizer only."""
        preparer = self._loaded.preparer
        tokenizer = preparer.tokenizer
        if isinstance(work, Detokenize):
            texts = tokenizer.decode(work.inputs, skip_special_tokens=work.skip_special_tokens)
            return DetokenizeReply(tuple(texts))
        explained = tokenizer.explain(
            preparer.prompted(work), add_special_tokens=work.add_special_tokens, pieces=work.pieces
        )
        return TokenizeReply(tuple(tuple(tokens) for tokens in explained))

    def _enqueue(self, job: Job) -> None:
        backlog = self._media if job.bytes else self._texts
        with self._lock:
            if not backlog.has_room(job):
                raise ReplicaOverloaded("the engine's queue is full")
            backlog.append(job)
            self._request_turn(backlog)

    def _request_turn(self, backlog: Backlog) -> None:
        """Queue a turn, unless one has not begun yet or as many run as can."""
        if backlog.turns < backlog.turns_max and not backlog.is_due:
            backlog.turns += 1
            backlog.is_due = True
            backlog.threads.enter(partial(self._turn, backlog))

    def _turn(self, backlog: Backlog) -> bool:
        """Run one forward pass; return False if there is none. Other engines' turns go before the next."""
        with self._lock:
            backlog.is_due = False
            batch = self._next(backlog)
            if batch is None:
                backlog.turns -= 1
                return False
            self.recorder.batch(len(batch.members), batch.tokens)
            if not backlog.is_empty:
                self._request_turn(backlog)
        backlog.threads.take_cores()
        self._forward(batch)
        return True

    def _next(self, backlog: Backlog) -> Batch | None:
        while (line := backlog.next_line()) is not None:
            if not line.planned:
                # Enough for a few passes, so that similar lengths can share one.
                now_s = perf_counter()
                jobs = backlog.take(line, self.batch_tokens * FORWARDS_AHEAD, now_s)
                try:
                    line.planned.extend(list(self._batches(jobs, backlog, now_s)))
                except Exception:
                    logger.exception("batches could not be planned")
                    fail_jobs(jobs)
            if line.planned:
                return line.planned.popleft()
        return None

    def _batches(self, jobs: Sequence[Job], backlog: Backlog, began_s: float) -> Iterator[Batch]:
        for job in jobs:
            job.began_s = began_s
        limit = self.batch_tokens
        if backlog.is_mixed(began_s):
            limit = min(limit, max(PART_TOKENS_MIN, limit // MIXED_PARTS))
        for outputs, members in _groups(jobs):
            lengths = [job.sequences[i].tokens for job, i in members]
            budget = limit
            # A GPU computes one pass after the other, and two of half the size take longer.
            if backlog.turns_max > 1 and backlog.threads.shares_cores:
                budget = min(budget, _tokens_per_pass(lengths, backlog.turns_max))
            for batch in plan(lengths, budget, packed=self._loaded.packed):
                yield Batch([members[index] for index in batch], outputs)

    def _forward(self, batch: Batch) -> None:
        jobs = {job for job, _ in batch.members}
        try:
            self._runner.compute(batch.members, batch.outputs)
        except Exception:
            # The jobs fail, and the engine continues.
            logger.exception("a turn failed")
            fail_jobs(jobs)
        for job in jobs:
            # Finished jobs are resolved at once, while the next pass runs.
            if job.missing == 0:
                job.resolve()


def _backlogs(loaded: LoadedModel, threads: ForwardThreads, queue_tokens: int) -> tuple[Backlog, Backlog]:
    """Return the backlog of texts and that of pictures and recordings, which may be one.

    A picture takes a hundred times as long as a short text, which would wait for every picture before it.
    """
    turns_max = threads.count if loaded.reentrant else 1
    if loaded.media is None:
        texts = Backlog(threads, turns_max, queue_tokens)
        return texts, texts
    media = Backlog(threads.background, turns_max, queue_tokens)
    # Two passes of such a network would disturb each other.
    return (Backlog(threads, turns_max, queue_tokens) if loaded.reentrant else media), media


def _tokens_per_pass(lengths: Sequence[int], passes: int) -> int:
    """Return the tokens of each of several passes of similar size; the last has room for the rest."""
    return max(PART_TOKENS_MIN, (sum(lengths) + max(lengths)) // passes + 1)


def _groups(jobs: Sequence[Job]) -> Iterator[tuple[frozenset[Output], list[Member]]]:
    """Yield the sequences that one pass can compute: with the same outputs, all texts or none."""
    groups: dict[tuple[frozenset[Output], bool], list[Member]] = {}
    for job in jobs:
        for i in range(job.missing):
            is_text = job.sequences[i].features is None
            groups.setdefault((job.outputs, is_text), []).append((job, i))
    for (outputs, _), members in groups.items():
        yield outputs, members


def _characters(loaded: LoadedModel, work: Embed) -> int:
    """Return an upper bound of the characters, with the longest prompt before each input."""
    prompts = loaded.recipe.prompts.values()
    return sum(map(len, work.inputs)) + len(work.inputs) * max(map(len, prompts), default=0)
