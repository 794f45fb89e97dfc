"""Jobs as their owners see them, over a table in SQLite and a folder."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.batches.files import Files
from gateway.batches.jobs import Jobs
from gateway.batches.objects import FolderObjects
from gateway.batches.records import (
    JOB_PLAN,
    Chunk,
    ChunkResult,
    Counts,
    Endpoint,
    FinalRecord,
    Job,
    Owner,
    Plan,
)
from gateway.batches.sqlite_store import SqliteJobStore
from gateway.batches.store import FILE_BYTES, JobStore, Page, Row, chunk_row, job_row
from gateway.config.schema import BatchesSettings
from gateway.errors import FileStorageFull, Overloaded

NewJob = tuple[str, Owner, Endpoint, str]
RESULT = ChunkResult("attempt", Counts(3, 1, 0, 20), {"out": 10, "err": 5})


class UnreadObjects(FolderObjects):
    """A folder whose contents nobody may read."""

    def stream(self, name: str, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        raise AssertionError(name, offset, length)


class Store(SqliteJobStore):
    """Store that notes of which jobs the progress is read, and does something before a row is put."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.progress_of: list[str] = []
        self.before_put: list[Callable[[], Awaitable[object]]] = []

    async def progress(self, job: str) -> dict[int, ChunkResult]:
        """Return the results of finished chunks."""
        self.progress_of.append(job)
        return await super().progress(job)

    async def put(self, row: Row, *bounds: Any, **options: Any) -> None:
        """Add or replace a row."""
        while self.before_put:
            await self.before_put.pop()()
        await super().put(row, *bounds, **options)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(tmp_path / "jobs.sqlite")
    yield store
    await store.aclose()


def files_in(folder: Path, store: JobStore) -> Files:
    settings = BatchesSettings(str(folder), jobs_per_tenant=3, kept_jobs_per_tenant=4)
    return Files(settings, UnreadObjects(folder), store)


async def jobs_in(folder: Path, store: JobStore) -> tuple[Jobs, NewJob]:
    files = files_in(folder, store)
    async with files.uploading("acme", 0) as upload:
        await upload.write(b"{")
        upload.end("a.jsonl")
    file = upload.record
    return Jobs(files, lambda _: None), ("acme", Owner("key", ""), "/v1/embeddings", file.id)


async def test_jobs_that_come_together_stay_within_the_bound(tmp_path: Path, store: JobStore) -> None:
    jobs, new = await jobs_in(tmp_path, store)

    outcomes = await asyncio.gather(*(jobs.create(*new) for _ in range(9)), return_exceptions=True)

    created = [job.id for job in outcomes if isinstance(job, Job)]
    assert len(created) == 3
    assert sum(isinstance(error, Overloaded) for error in outcomes) == 6
    # What was refused has left nothing.
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == sorted(created)
    listed, has_more = await jobs.list(Page("batch", "acme", 9))
    assert (sorted(state.job.id for state in listed), has_more) == (sorted(created), False)


async def test_uploads_that_come_together_stay_within_the_bound(tmp_path: Path, store: JobStore) -> None:
    files = Files(BatchesSettings(str(tmp_path), files_per_tenant=2), FolderObjects(tmp_path), store)
    begun = asyncio.Barrier(4)

    async def upload_one() -> str:
        async with files.uploading("acme", 10) as upload:
            await begun.wait()
            await upload.write(b"{}")
            upload.end("a.jsonl")
        return upload.record.id

    outcomes = await asyncio.gather(*(upload_one() for _ in range(4)), return_exceptions=True)

    kept = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert [FileStorageFull] * 2 == [type(outcome) for outcome in outcomes if outcome not in kept]
    assert await store.used_bytes() == 2 * (2 + FILE_BYTES)
    # What was refused has left nothing.
    found = [entry.name for folder in ("files", "unfinished") for entry in os.scandir(tmp_path / folder)]
    assert sorted(found) == sorted(f"{id_}.{kind}" for id_ in kept for kind in ("json", "data"))


async def test_ended_jobs_count_until_they_are_removed(tmp_path: Path, store: JobStore) -> None:
    jobs, new = await jobs_in(tmp_path, store)
    for job in [await jobs.create(*new) for _ in range(3)]:
        await store.put(job_row(msgspec.structs.replace(job, status="failed", failed_s=1.0)))
    last = await jobs.create(*new)

    with pytest.raises(FileStorageFull, match="kept_jobs_per_tenant"):
        await jobs.create(*new)
    await store.remove(last.id)
    await jobs.create(*new)


async def test_counts_are_read_again_only_after_a_chunk(tmp_path: Path, store: Store) -> None:
    jobs, new = await jobs_in(tmp_path, store)
    job = (await jobs.create(*new)).planned(Plan(1.0, total=8))
    await store.put(job_row(job))
    seen = []
    for number in range(3):
        seen += [(await jobs.get("acme", job.id)).job.counts.completed for _ in range(3)]
        await store.finish(job.id, number, RESULT)

    assert seen == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert store.progress_of == [job.id] * 2


async def test_a_cancellation_is_not_replaced_by_an_older_row(tmp_path: Path, store: Store) -> None:
    jobs, new = await jobs_in(tmp_path, store)
    job = (await jobs.create(*new)).planned(Plan(1.0, total=8))
    store.before_put.append(lambda: jobs.cancel("acme", job.id))
    stored = await jobs.put_latest(job)

    state = await jobs.get("acme", job.id)
    assert (stored.status, state.job.status, state.job.total) == ("cancelling", "cancelling", 8)


async def test_a_cancellation_replaces_no_newer_row(tmp_path: Path, store: JobStore) -> None:
    jobs, new = await jobs_in(tmp_path, store)
    job = await jobs.create(*new)
    plan = Plan(1.0, total=8)
    # Its validation ends after the owner's request has read its row.
    await jobs.objects.create(JOB_PLAN.format(job.id), msgspec.json.encode(plan))
    await jobs.cancel("acme", job.id)

    found = (await jobs.get("acme", job.id)).job
    assert (found.status, found.total, found.in_progress_s) == ("cancelling", 8, 1.0)


async def test_chunks_of_a_removed_job_count_no_bytes(tmp_path: Path, store: JobStore) -> None:
    jobs, new = await jobs_in(tmp_path, store)
    before = await store.used_bytes()
    running = (await jobs.create(*new)).planned(Plan(1.0, total=1, chunks=(Chunk(0, 1, 0, 1),)))
    await jobs.end(FinalRecord(running.ended(Counts(), {"out": 0, "err": 0}, 2.0)))
    # A try that went on.
    await store.put(chunk_row(running, 0, 10_000))

    await jobs.forget(running)

    assert await store.used_bytes() == before
