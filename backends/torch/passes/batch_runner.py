"""Forward passes of one engine: rows for the sequences of a batch, and recovery from failed passes.

Runs on the threads that compute.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Lock

from backends.contract import Output
from backends.torch.inputs.sequences import Head
from backends.torch.memory import is_exhausted
from backends.torch.passes.jobs import Member, count_tokens, failure_of

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
