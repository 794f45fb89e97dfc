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
from typing import TypeVar

import numpy as np

from backends.contract import (
    Embed,
    Embedded,
    Reply,
    Rerank,
    Reranked,
    Tokenize,
    Tokenized,
    Vectors,
    Work,
    operation_of,
)
from backends.errors import BackendError, Failed, InvalidWork, Overloaded, UnsupportedWork
from backends.tokens import Sequences
from backends.torch.loader import Loaded
from backends.torch.planner import plan
from backends.vectors import shaped, sigmoid

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

    def __init__(self, sequences: Sequences, skip: int) -> None:
        self.sequences = sequences
        self.skip = skip
        self.tokens = sum(sequences.lengths)
        self.rows: list[Vectors | None] = [None] * len(sequences.ids)
        self.missing = len(sequences.ids)
        self.error: BackendError | None = None
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def resolve(self) -> None:
        """Tell the waiting caller; called from the loop's thread."""
        self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


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
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, "tokenize")
        (thread or ForwardThread()).submit(self._loop)

    async def run(self, work: Work) -> Reply:
        """Carry out one piece of work.

        Raises: InvalidWork, UnsupportedWork, Overloaded, Failed.
        """
        if operation_of(work) not in self._loaded.capabilities.operations:
            raise UnsupportedWork(f"this model does not {operation_of(work).value}")
        loop = asyncio.get_running_loop()
        if isinstance(work, Tokenize):
            return await loop.run_in_executor(self._tokenizing, self._explain, work)
        if not isinstance(work, Embed | Rerank):
            raise UnsupportedWork("this engine does not do that")
        sequences, skip = await loop.run_in_executor(self._tokenizing, self._tokenize, work)
        job = Job(sequences, skip)
        self._enqueue(job)
        await job.done
        rows = np.stack([row for row in job.rows if row is not None])
        return _finished(work, rows, job)

    def _tokenize(self, work: Embed | Rerank) -> tuple[Sequences, int]:
        tokenizer = self._loaded.tokenizer
        if isinstance(work, Rerank):
            return tokenizer.encode_pairs(work.query, work.documents, work.truncate), 0
        self._check_dimensions(work.dimensions)
        prompt = self._prompt(work.prompt_name)
        sequences = tokenizer.encode(self._prepared(prompt, work.inputs), work.truncate)
        if not prompt or self._loaded.recipe.include_prompt:
            return sequences, 0
        # The prompt alone ends in a separator that the prompted text does not have there.
        alone = tokenizer.encode([prompt], work.truncate).lengths[0] - 1
        return sequences, alone

    def _explain(self, work: Tokenize) -> Tokenized:
        texts = self._prepared(self._prompt(work.prompt_name), work.inputs)
        explained = self._loaded.tokenizer.explain(texts, add_special_tokens=work.add_special_tokens)
        return Tokenized(tuple(tuple(tokens) for tokens in explained))

    def _prompt(self, name: str | None) -> str:
        recipe = self._loaded.recipe
        chosen = recipe.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in recipe.prompts:
            known = ", ".join(sorted(recipe.prompts)) or "none"
            raise InvalidWork(f"the model has no prompt named {chosen!r}; it has: {known}")
        return recipe.prompts[chosen]

    def _prepared(self, prompt: str, inputs: Sequence[str]) -> list[str]:
        texts = [prompt + text for text in inputs]
        return [text.lower() for text in texts] if self._loaded.recipe.lower_case else texts

    def _check_dimensions(self, dimensions: int | None) -> None:
        width = self._loaded.capabilities.dimensions or 0
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InvalidWork(f"`dimensions` must be between 1 and {width}, not {dimensions}")

    def _enqueue(self, job: Job) -> None:
        with self._arrived:
            if self._queue and self._queued_tokens + job.tokens > self._queue_tokens:
                raise Overloaded("the engine's queue is full")
            self._queue.append(job)
            self._queued_tokens += job.tokens
            self._arrived.notify()

    def _loop(self) -> None:
        while True:
            jobs = self._schedule()
            try:
                self._forward(jobs)
            except Exception as error:
                # Someone waits for each of these jobs, whatever went wrong.
                logger.exception("a forward pass failed")
                _fail(jobs, Failed(f"the model failed: {type(error).__name__}"))
                for job in jobs:
                    job.resolve()

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
                    jobs.append(job)
                    tokens += job.tokens
            return jobs

    def _forward(self, jobs: Sequence[Job]) -> None:
        places = [(job, i) for job in jobs for i in range(len(job.rows))]
        lengths = [len(job.sequences.ids[i]) for job, i in places]
        for batch in plan(lengths, self._batch_tokens, packed=self._loaded.packed):
            members = [places[index] for index in batch]
            rows = self._loaded.head.run(
                [job.sequences.ids[i] for job, i in members],
                [job.sequences.type_ids[i] for job, i in members],
                [job.skip for job, _ in members],
            )
            finite = [bool(np.isfinite(row).all()) for row in rows]
            for (job, i), row, whole in zip(members, rows, finite, strict=True):
                job.rows[i] = row
                job.missing -= 1
                if not whole:
                    job.error = Failed(f"the model gave no finite numbers for input {i}")
            for job in {job for job, _ in members}:
                # What is done leaves at once, while the next forward runs.
                if job.missing == 0:
                    job.resolve()


def _fail(jobs: Sequence[Job], error: BackendError) -> None:
    for job in jobs:
        job.error = error


def _finished(work: Embed | Rerank, rows: Vectors, job: Job) -> Reply:
    if isinstance(work, Rerank):
        logits = rows[:, 0]
        scores = logits if work.raw_scores else sigmoid(logits)
        return Reranked(np.ascontiguousarray(scores), job.tokens, job.sequences.truncated)
    vectors = shaped(rows, dimensions=work.dimensions, normalize=work.normalize)
    lengths = tuple(job.sequences.lengths)
    return Embedded(vectors, job.tokens, job.sequences.truncated, lengths)
