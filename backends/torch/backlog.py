"""Work of one engine that waits for the same threads."""

from collections import deque

from backends.torch.jobs import Batch, Job
from backends.torch.threads import ForwardThreads

# Features of pictures and recordings that wait for their pass.
QUEUED_BYTES_MAX = 512 * 1024 * 1024


class Backlog:
    """Jobs in order, the batches planned from them, and the turns that compute them.

    threads: run its turns. turns_max: turns at once. tokens_max: bound of the waiting jobs. turns: queued or
    running. is_due: a queued turn has not begun yet. The engine's lock guards all of them.
    """

    def __init__(self, threads: ForwardThreads, turns_max: int, tokens_max: int) -> None:
        self.threads = threads
        self.turns_max = turns_max
        self.planned: deque[Batch] = deque()
        self.turns = 0
        self.is_due = False
        self._jobs: deque[Job] = deque()
        self._tokens_max = tokens_max
        self._tokens = self._bytes = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self.planned and not self._jobs

    @property
    def waiting_inputs(self) -> int:
        """Number of inputs of the waiting jobs."""
        return sum(len(job.rows) for job in self._jobs)

    def has_room(self, job: Job) -> bool:
        """Return whether a job may wait; the first one always may."""
        fits = self._tokens + job.tokens <= self._tokens_max and self._bytes + job.bytes <= QUEUED_BYTES_MAX
        return fits or not self._jobs

    def append(self, job: Job) -> None:
        """Add a job at the end."""
        self._jobs.append(job)
        self._tokens += job.tokens
        self._bytes += job.bytes

    def take(self, tokens_max: int) -> list[Job]:
        """Remove jobs in order, up to so many tokens but at least one; cancelled ones are dropped."""
        taken: list[Job] = []
        tokens = 0
        while self._jobs and (not taken or tokens + self._jobs[0].tokens <= tokens_max):
            job = self._jobs.popleft()
            self._tokens -= job.tokens
            self._bytes -= job.bytes
            if not job.done.cancelled():
                taken.append(job)
                tokens += job.tokens
        return taken
