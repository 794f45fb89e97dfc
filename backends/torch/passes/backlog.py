"""Work of one engine that waits for the same threads.

A person may wait for a small job while other callers send thousands of texts: the two kinds have a line each,
and take turns.
"""

import math
from collections import deque

from backends.torch.passes.jobs import Batch, Job
from backends.torch.passes.threads import ForwardThreads

# Features of pictures and recordings that wait for their pass.
QUEUED_BYTES_MAX = 512 * 1024 * 1024
# Tokens of a small job, and the time for which a line counts as in use after its last job was taken.
SMALL_TOKENS, RECENT_S = 512, 5.0


class Line:
    """Jobs of one kind in order, and the batches planned from them."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.planned: deque[Batch] = deque()
        self.taken_s = -math.inf

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self.planned and not self.jobs

    def is_used(self, now_s: float) -> bool:
        """Return whether jobs wait here, or were taken recently."""
        return not self.is_empty or self.taken_s > now_s - RECENT_S


class Backlog:
    """Two lines of work, and the turns that compute them.

    threads: run its turns. turns_max: turns at once. tokens_max: bound of the waiting jobs. turns: queued or
    running. is_due: a queued turn has not begun yet. The engine's lock guards all of them.
    """

    def __init__(self, threads: ForwardThreads, turns_max: int, tokens_max: int) -> None:
        self.threads = threads
        self.turns_max = turns_max
        self.turns = 0
        self.is_due = False
        self._small, self._large = Line(), Line()
        self._last = self._large
        self._tokens_max = tokens_max
        self._tokens = self._bytes = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return self._small.is_empty and self._large.is_empty

    @property
    def waiting_inputs(self) -> int:
        """Number of inputs of the waiting jobs."""
        return sum(len(job.rows) for line in (self._small, self._large) for job in line.jobs)

    def is_mixed(self, now_s: float) -> bool:
        """Return whether both small and large jobs come."""
        return self._small.is_used(now_s) and self._large.is_used(now_s)

    def has_room(self, job: Job) -> bool:
        """Return whether a job may wait; the first one always may."""
        fits = self._tokens + job.tokens <= self._tokens_max and self._bytes + job.bytes <= QUEUED_BYTES_MAX
        return fits or not (self._small.jobs or self._large.jobs)

    def append(self, job: Job) -> None:
        """Add a job at the end of its line."""
        line = self._small if job.tokens <= SMALL_TOKENS else self._large
        line.jobs.append(job)
        self._tokens += job.tokens
        self._bytes += job.bytes

    def next_line(self) -> Line | None:
        """Return the line that has the next pass: the other one than before, if something waits there."""
        other = self._large if self._last is self._small else self._small
        line = next((line for line in (other, self._last) if not line.is_empty), None)
        self._last = line or self._last
        return line

    def take(self, line: Line, tokens_max: int, now_s: float) -> list[Job]:
        """Remove jobs in order, up to so many tokens but at least one; cancelled ones are dropped."""
        taken: list[Job] = []
        tokens = 0
        while line.jobs and (not taken or tokens + line.jobs[0].tokens <= tokens_max):
            job = line.jobs.popleft()
            self._tokens -= job.tokens
            self._bytes -= job.bytes
            if not job.done.cancelled():
                taken.append(job)
                tokens += job.tokens
        if taken:
            line.taken_s = now_s
        return taken
