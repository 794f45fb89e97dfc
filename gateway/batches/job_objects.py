"""Objects of jobs, as structs."""

from typing import TypeVar

import msgspec

from gateway.batches import names
from gateway.batches.objects import Objects
from gateway.batches.records import ChunkResult, FinalRecord, Job, Moment, Plan, cancelling, planned

Record = TypeVar("Record")


class JobObjects:
    """Records and marks of jobs. Every method raises ObjectsUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def create(self, name: str, record: msgspec.Struct) -> bool:
        """Create a record; return False if another writer was first."""
        return await self._objects.create(name, msgspec.json.encode(record))

    async def plan(self, job: str) -> Plan | None:
        """Return the plan of a job, None before its validation."""
        return await self._read(names.plan(job), Plan)

    async def final(self, job: str) -> FinalRecord | None:
        """Return the end of a job, None before it."""
        return await self._read(names.final(job), FinalRecord)

    async def result(self, job: str, number: int) -> ChunkResult | None:
        """Return the stored result of a chunk, None if it has none."""
        return await self._read(names.chunk(job, number), ChunkResult)

    async def finished_chunks(self, job: str) -> list[int]:
        """Return the numbers of the chunks that have a result."""
        marks = await self._objects.names(names.chunks(job))
        return [names.number_of_chunk(mark) for mark in marks]

    async def latest(self, job: Job) -> Job:
        """Return a job that has not ended with the marks of its plan and its cancellation."""
        plan = await self.plan(job.id)
        if plan is not None:
            job = planned(job, plan)
        moment = await self._read(names.cancellation(job.id), Moment)
        return job if moment is None or job.is_over else cancelling(job, moment)

    async def rebuild(self, job: str) -> Job | None:
        """Return a job as its objects describe it, None if there is no such job."""
        final = await self.final(job)
        if final is not None:
            return final.job
        created = await self._read(names.created(job), Job)
        return None if created is None else await self.latest(created)

    async def _read(self, name: str, kind: type[Record]) -> Record | None:
        data = await self._objects.read(name)
        return None if data is None else msgspec.json.decode(data, type=kind)
