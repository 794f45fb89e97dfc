"""Jobs of an engine: the sequences of one piece of work on their way to rows, and batches of them.

Grouping of sequences into forward passes. Pure: lengths and a token budget in, batches out.

Knows nothing of tensors, texts or callers.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple, TypeAlias

from backends.contract import Output
from backends.contract.errors import BackendError, InvalidWork, ReplicaFailed
from backends.torch.inputs.sequences import PreparedSequences, Row
from backends.torch.memory import is_exhausted

# A packed batch is still a rectangle at its edges. Where one long sequence would leave that mostly empty, the
# short ones get batches of their own.
RECTANGLE_BUDGETS = 2


def plan(lengths: Sequence[int], budget_tokens: int, *, packed: bool) -> list[list[int]]:
    """Group indices into batches within the budget.

    A packed batch counts its own tokens, any other those of its padding too. Longest first: sequences of
    similar length are computed together, with little padding. A sequence above the budget is a batch of its
    own. Every index appears exactly once.
    """
    rectangle = budget_tokens * RECTANGLE_BUDGETS if packed else budget_tokens
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[index]
        # The first sequence of a batch is its longest, and all others are padded to its length.
        if batches and (
            tokens <= budget_tokens and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= rectangle
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches


logger = logging.getLogger(__name__)


class Job:
    """Sequences of one piece of work.

    tokens, bytes: of all sequences; bytes are those of features. missing: number of rows that are not
    computed yet. tokenized_s, began_s, ended_s: on time.perf_counter.
    """

    def __init__(self, prepared: PreparedSequences) -> None:
        self.prepared = prepared
        self.sequences = prepared.sequences
        self.outputs = prepared.outputs
        self.tokens = sum(sequence.tokens for sequence in prepared.sequences)
        self.bytes = sum(
            sequence.features.bytes for sequence in prepared.sequences if sequence.features is not None
        )
        self.rows: list[Row | None] = [None] * len(prepared.sequences)
        self.missing = len(prepared.sequences)
        self.error: BackendError | None = None
        self.tokenized_s = self.began_s = self.ended_s = perf_counter()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def give(self, place: int, row: Row | None) -> None:
        """Set the row of one sequence; None for a sequence that failed, after `error` was set."""
        self.rows[place] = row
        self.missing -= 1

    def blame(self, place: int, fault: str) -> None:
        """Fail with the fault of one sequence; of several faults, that of the first input remains."""
        index, former = self.prepared.input_of(place), self.error
        if not isinstance(former, InvalidWork) or (former.input_index or 0) > (index or 0):
            self.error = InvalidWork(fault, input_index=index)

    def resolve(self) -> None:
        """Wake the waiting caller; called from a thread that computes."""
        self.ended_s = perf_counter()
        self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)


# One sequence of a job, by its place.
Member: TypeAlias = tuple[Job, int]


class Batch(NamedTuple):
    """Sequences of one forward pass, and the outputs to read from it."""

    members: Sequence[Member]
    outputs: frozenset[Output]

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return count_tokens(self.members)


def count_tokens(members: Sequence[Member]) -> int:
    """Sum the tokens of some sequences."""
    return sum(job.sequences[i].tokens for job, i in members)


def fail_jobs(jobs: Iterable[Job]) -> None:
    """Resolve jobs that will not be computed."""
    for job in jobs:
        job.error = job.error or ReplicaFailed("the engine broke")
        job.resolve()


def failure_of(member: Member, error: Exception) -> ReplicaFailed:
    """Return the error for the caller of a sequence that failed alone."""
    job, place = member
    if is_exhausted(error):
        tokens = job.sequences[place].tokens
        return ReplicaFailed(f"there is not enough memory for an input of {tokens} tokens, even alone")
    logger.error("a forward pass failed", exc_info=error)
    return ReplicaFailed(f"the model failed: {type(error).__name__}")
