"""Store of rows, of the queue of chunks, and of reasons for waits: the protocol of SQLite and Redis.

A row has the record of a file or a job as JSON, and what is counted or searched. Rows follow the objects:
nothing here is the only copy, and the objects of `objects.py` are enough to build it again. Bytes that count
towards the bounds of a tenant are the sum of its rows. A chunk in the queue has one owner at a time, for a
lease that it renews; a chunk whose owner was killed goes to the next gateway that asks.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from gateway.batches.records import ChunkResult, FileRecord, Job

Kind = Literal["file", "batch"]
Bound = Literal["tenant", "total", "active", "shown"]
Record = TypeVar("Record")
# Number in the queue that stands for the validation of a job's input.
VALIDATION = -1
# A chunk whose owner has not renewed it for this long belongs to the next one that asks.
LEASE_S = 15.0
RENEW_S = 4.0
# Of the rows of one page: what one request can make a gateway read, decode and encode at a time.
PAGE_BYTES = 1024 * 1024
# Rows that are read at a time while a list is filtered.
ROWS_AT_ONCE = 500
# What a file takes besides its content: blocks and names of two objects on a disk, and a row in memory.
FILE_BYTES = 8 * 1024
# The objects of a job, without what its owner decides: its record, plan, cancellation, end, and folders.
JOB_BYTES = 20 * 1024
# A chunk's mark and the ends of its two objects of results, and their names in the plan and the end.
CHUNK_BYTES = 8 * 1024
# A job's metadata and problems are in objects at its creation or validation, at its end, and in its row.
COPIES = 3


class BoundExceeded(Exception):
    """A bound on bytes, of a tenant or in total, or on active or shown rows of a tenant would be exceeded."""

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound)
        self.bound = bound


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


class Bounds(msgspec.Struct, frozen=True):
    """Bounds on the bytes of the files and jobs of one tenant, and of all; and on rows of one tenant.

    shown, active: rows of one kind; checked if the row is not shown yet, and `shown` is not None.
    """

    tenant: int
    total: int
    shown: int | None = None
    active: int = 0


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


class QueueState(msgspec.Struct, frozen=True, array_like=True):
    """Queue of a job. open: chunks that are not finished. finished: chunks that have a result.

    is_known: the queue knows the job. is_idle: chunks are open, and no owner has one of them.
    """

    is_known: bool
    open: int
    finished: int
    is_idle: bool


class JobStore(Protocol):
    """Rows, chunks and reasons in one store. Every method raises StoreUnavailable."""

    async def put(self, row: Row, bounds: Bounds | None = None, *, is_trial: bool = False) -> None:
        """Add or replace a row. bounds: on bytes are checked if the row takes more than before.

        is_trial: change nothing. Raises: BoundExceeded.
        """

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

    async def queue_of(self, job: str) -> QueueState:
        """Return the state of a job's queue."""

    async def drop(self, job: str) -> None:
        """Remove a job's chunks and their results."""

    async def put_wait(self, job: str, reason: str, for_s: float) -> None:
        """Keep the reason for which a job waits for a time."""

    async def wait_of(self, job: str) -> str | None:
        """Return the reason for which a job waits, None if none is kept."""

    async def aclose(self) -> None:
        """Close the connection."""


async def all_rows(store: JobStore, page: Page) -> AsyncIterator[Row]:
    """Yield the shown rows from a page on, of which as many as its limit are read at a time."""
    after = page.after
    while rows := await store.rows(msgspec.structs.replace(page, after=after)):
        for row in rows:
            yield row
        after = rows[-1].id


async def find(
    store: JobStore, page: Page, read: Callable[[Row], Record | None], at_once: int = ROWS_AT_ONCE
) -> tuple[list[Record], bool]:
    """Return a page of records and whether there are more. read: returns None for one that is not wanted."""
    found: list[Record] = []
    room = page.data_bytes
    async for row in all_rows(store, msgspec.structs.replace(page, limit=at_once)):
        record = read(row)
        if record is None:
            continue
        if len(found) == page.limit or (found and row.data_bytes > room):
            return found, True
        found.append(record)
        room -= row.data_bytes
    return found, False


def file_row(record: FileRecord) -> Row:
    """Return the row of a file. It counts what the file takes besides its content, too."""
    size = record.bytes + FILE_BYTES
    data = msgspec.json.encode(record).decode()
    at_ms = round(record.created_s * 1000)
    return Row("file", record.id, record.tenant, at_ms, size, record.is_ready, is_active=False, data=data)


def job_row(job: Job) -> Row:
    """Return the row of a job.

    It counts its records, and until its end the results that it has at least; others have rows of their own.
    """
    data = msgspec.json.encode(job)
    results = 0 if job.is_over else job.unexecuted_bytes
    size = JOB_BYTES + COPIES * len(data) + CHUNK_BYTES * job.chunks + results
    at_ms = round(job.created_s * 1000)
    return Row(
        "batch", job.id, job.tenant, at_ms, size, is_shown=True, is_active=not job.is_over, data=data.decode()
    )


def chunk_row(job: Job, number: int, size: int) -> Row:
    """Return the row that counts the bytes of a chunk's results until the job ends."""
    at_ms = round(job.created_s * 1000)
    id_ = chunk_row_id(job.id, number)
    return Row("file", id_, job.tenant, at_ms, size, is_shown=False, is_active=False, data="{}")


def chunk_row_id(job: str, number: int) -> str:
    """Return the id of the row that counts the bytes of a chunk's results."""
    return f"chunk:{job}:{number}"


def file_of(row: Row) -> FileRecord:
    """Return the file of a row."""
    return msgspec.json.decode(row.data, type=FileRecord)


def job_of(row: Row) -> Job:
    """Return the job of a row."""
    return msgspec.json.decode(row.data, type=Job)
