"""Table of files and jobs, and the queue of chunks: the protocol that SQLite and Redis share.

Rule: nothing here is the only copy. The objects of `objects.py` are enough to build it again.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from gateway.batches.records import ChunkResult, FileRecord, Job

Kind = Literal["file", "batch"]
# Number in the queue that stands for the validation of a job's input.
VALIDATION = -1
# A chunk whose owner has not renewed it for this long belongs to the next one that asks.
LEASE_S = 15.0
RENEW_S = 4.0
# Of the rows of one page: what one request can make a gateway read, decode and encode at a time.
PAGE_BYTES = 1024 * 1024
# What a file takes besides its content: blocks and names of two objects on a disk, and a row in memory.
FILE_BYTES = 8 * 1024
# The objects of a job, without what its owner decides: its record, plan, cancellation, end, and folders.
JOB_BYTES = 20 * 1024
# A chunk's mark and the ends of its two objects of results, and their names in the plan and the end.
CHUNK_BYTES = 8 * 1024
# A job's metadata and problems are in objects at its creation or validation, at its end, and in its row.
COPIES = 3


class JobStoreUnavailable(Exception):
    """The table cannot be reached now. The message is safe to log."""


class StorageFull(Exception):
    """A bound on the bytes of files and jobs would be exceeded. of_tenant: by those of one tenant."""

    def __init__(self, *, of_tenant: bool) -> None:
        super().__init__()
        self.of_tenant = of_tenant


class TooManyRows(Exception):
    """A bound on the rows of a tenant would be exceeded. of_active: on those that are active."""

    def __init__(self, *, of_active: bool) -> None:
        super().__init__()
        self.of_active = of_active


class Row(msgspec.Struct, frozen=True):
    """A row of the table.

    at_ms: creation, since 1970. bytes: that count towards the bounds. is_shown: it appears in lists.
    is_active: a job that has not ended. data: JSON of the record.
    """

    kind: Kind
    id: str
    tenant: str
    at_ms: int
    bytes: int
    is_shown: bool
    is_active: bool
    data: str

    @property
    def data_bytes(self) -> int:
        """Length of the record."""
        return len(self.data.encode())


class ByteBounds(msgspec.Struct, frozen=True):
    """Bounds on the bytes of the files and jobs of one tenant, and of all."""

    tenant: int
    total: int


class RowBounds(msgspec.Struct, frozen=True):
    """Bounds on the rows of one kind of one tenant: those that are shown, and those that are active."""

    shown: int
    active: int


class Page(msgspec.Struct, frozen=True):
    """Part of a list that is asked for. tenant: None for all. after: id of the last one seen.

    data_bytes: the list ends after the row with which the data of all is longer.
    """

    kind: Kind
    tenant: str | None
    limit: int
    after: str | None = None
    newest_first: bool = True
    data_bytes: int = PAGE_BYTES


class JobTable(Protocol):
    """Rows of files and jobs. Every method raises JobStoreUnavailable."""

    async def put(self, row: Row, bounds: ByteBounds | None = None, counts: RowBounds | None = None) -> None:
        """Add or replace a row. bounds: checked if the row takes more bytes. counts: if it is not shown yet.

        Raises: StorageFull, TooManyRows.
        """

    async def check(self, row: Row, bounds: ByteBounds, counts: RowBounds) -> None:
        """Raise what `put` would raise now, and change nothing."""

    async def get(self, id_: str) -> Row | None:
        """Return a row, None if there is none."""

    async def remove(self, id_: str) -> None:
        """Remove a row; a missing one is no error."""

    async def rows(self, page: Page) -> list[Row]:
        """Return shown rows in the order of their creation; none if the row before them is gone."""

    async def active(self, tenant: str | None = None) -> list[Row]:
        """Return the jobs of a tenant, or of all, that have not ended, oldest first."""

    async def unfinished(self, before_ms: int) -> list[str]:
        """Return the ids of uploads that began before this time and were never completed."""

    async def used_bytes(self) -> int:
        """Return the bytes of all files and jobs."""

    async def agree(self, identity: str) -> str:
        """Return the identity of the objects that the table belongs to: this one, unless others differ."""

    async def beat(self) -> int:
        """Return a number that is higher each time, unless the store has lost data."""

    async def aclose(self) -> None:
        """Close the connection."""


class ChunkQueue(Protocol):
    """Chunks of jobs that have no result yet, and the results of the others.

    Every method raises JobStoreUnavailable.
    """

    async def enqueue(self, job: str, chunks: Sequence[int]) -> None:
        """Add chunks of a job to the queue. Adding one twice is no error."""

    async def claim(self, job: str, owner: str) -> int | None:
        """Return a chunk that no live owner has, None if there is none."""

    async def renew(self, job: str, chunks: Sequence[int], owner: str) -> None:
        """Keep chunks for another lease."""

    async def release(self, job: str, chunk: int, owner: str, after_s: float = 0.0) -> None:
        """Let others claim a chunk at once, or after a time of at most a lease.

        A chunk that was released may be released again, to let others claim it sooner.
        """

    async def finish(self, job: str, chunk: int, result: ChunkResult | None) -> None:
        """Take a chunk whose result is stored off the queue. result: None for a validation."""

    async def progress(self, job: str) -> dict[int, ChunkResult]:
        """Return the results of finished chunks."""

    async def finished(self, job: str) -> int:
        """Return the number of finished chunks."""

    async def is_queued(self, job: str) -> bool:
        """Return whether the queue knows the job."""

    async def has_chunks(self, job: str) -> bool:
        """Return whether a chunk of the job is in the queue, or in the hands of an owner."""

    async def is_idle(self, job: str) -> bool:
        """Return whether chunks of the job are in the queue, and no owner has one of them."""

    async def drop(self, job: str) -> None:
        """Remove a job's chunks and their results."""


class WaitReasons(Protocol):
    """Reasons for which jobs wait. Every method raises JobStoreUnavailable."""

    async def put(self, job: str, reason: str, for_s: float) -> None:
        """Keep the reason of a job for a time."""

    async def get(self, job: str) -> str | None:
        """Return the reason of a job, None if none is kept."""


class JobStore(msgspec.Struct, frozen=True):
    """A table, a queue and reasons for waits in one store."""

    table: JobTable
    queue: ChunkQueue
    waits: WaitReasons


def file_row(record: FileRecord) -> Row:
    """Return the row of a file. It counts what the file takes besides its content, too."""
    return Row(
        "file",
        record.id,
        record.tenant,
        round(record.created_s * 1000),
        record.bytes + FILE_BYTES,
        record.is_ready,
        is_active=False,
        data=msgspec.json.encode(record).decode(),
    )


def job_row(job: Job) -> Row:
    """Return the row of a job.

    It counts its records, and until its end the results that it has at least; others have rows of their own.
    """
    data = msgspec.json.encode(job)
    results = 0 if job.is_over else job.unexecuted_bytes
    return Row(
        "batch",
        job.id,
        job.tenant,
        round(job.created_s * 1000),
        JOB_BYTES + COPIES * len(data) + CHUNK_BYTES * job.chunks + results,
        is_shown=True,
        is_active=not job.is_over,
        data=data.decode(),
    )


def file_of(row: Row) -> FileRecord:
    """Return the file of a row."""
    return msgspec.json.decode(row.data, type=FileRecord)


def job_of(row: Row) -> Job:
    """Return the job of a row."""
    return msgspec.json.decode(row.data, type=Job)
