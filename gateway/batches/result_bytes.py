"""Bytes of a chunk's results, counted against the bounds on files before they are written."""

import asyncio

from gateway.batches import names
from gateway.batches.job_store import ByteBounds, JobTable, Row, StorageFull
from gateway.batches.records import Job

# Reserved at a time, before lines run.
RESERVE_BYTES = 1024 * 1024


class ResultBytes:
    """Bytes of the results of one try at a chunk. Every method raises JobStoreUnavailable.

    used: by results that are there, whether they are written or not.
    """

    def __init__(self, table: JobTable, bounds: ByteBounds, job: Job, number: int) -> None:
        self._table = table
        self._bounds = bounds
        self._job = job
        self._number = number
        self._reserving = asyncio.Lock()
        self._reserved = 0
        self.used = 0

    async def reserve(self) -> None:
        """Reserve room for the result of one more line. Raises: StorageFull."""
        async with self._reserving:
            while self.used >= self._reserved:
                try:
                    await self.put(self.used + RESERVE_BYTES, self._bounds)
                except StorageFull:
                    await self.put(self.used + 1, self._bounds)

    async def count(self) -> None:
        """Count results that are there, even beyond the bounds: they are paid for."""
        if self.used > self._reserved:
            await self.put(self.used)

    async def put(self, size: int, bounds: ByteBounds | None = None) -> None:
        """Replace what is counted. Raises: StorageFull."""
        await self._table.put(chunk_row(self._job, self._number, size), bounds)
        self._reserved = size


def chunk_row(job: Job, number: int, size: int) -> Row:
    """Return the row that counts the bytes of a chunk's results until the job ends."""
    at_ms = round(job.created_s * 1000)
    id_ = names.chunk_row(job.id, number)
    return Row("file", id_, job.tenant, at_ms, size, is_shown=False, is_active=False, data="{}")
