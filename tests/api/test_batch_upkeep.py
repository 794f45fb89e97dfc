"""Upkeep of files and batches: what was lost is read again, what has expired is removed."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.batches.objects import FolderObjects
from gateway.batches.records import (
    CHUNK_MARK,
    IDENTITY,
    JOB_FINAL,
    JOB_PLAN,
    PARTS,
    ChunkResult,
    Counts,
    FinalRecord,
)
from gateway.batches.sqlite_store import SqliteJobStore
from gateway.batches.store import FILE_BYTES, chunk_row_id, job_of, job_row
from tests.batches import ended, hold, only, results, run, servers, submit, texts, until, with_batches
from tests.conftest import Boots
from tests.fakes.tei import FakeTei


def lose_database(folder: Path) -> None:
    for path in folder.glob("batches.sqlite*"):
        path.unlink()


async def test_a_lost_database_is_built_again_from_the_files(boot: Boots, tmp_path: Path) -> None:
    config = with_batches(tmp_path)
    async with boot(servers(), config) as gateway:
        before = [await run(gateway, texts(5)) for _ in range(3)]
        await gateway.client.delete(f"/v1/files/{before[0]['output_file_id']}")
        files = (await gateway.client.get("/v1/files")).json()
    lose_database(tmp_path)
    async with boot(servers(), config) as gateway:
        batches = (await gateway.client.get("/v1/batches")).json()["data"]
        found = (await gateway.client.get("/v1/files")).json()
        output = await results(gateway, before[1]["output_file_id"])

    assert batches == before[::-1]
    assert found == files
    assert len(output) == 5


async def stop_midway(boot: Boots, config: str, server: FakeTei, calls_max: int) -> str:
    """Return a batch of 500 lines whose gateway stops when the server has answered so many calls."""
    calls = itertools.count(1)
    held = asyncio.Event()

    async def hold_later_calls(*_: Any) -> None:
        if next(calls) > calls_max:
            held.set()
            await asyncio.sleep(3600)

    server.hook = hold_later_calls
    async with boot(only(server), config) as gateway:
        batch = await submit(gateway, texts(500))
        await until(held.is_set)
    server.hook = None
    return batch


@pytest.mark.parametrize("loses_database", [False, True])
async def test_a_batch_goes_on_after_a_restart(boot: Boots, tmp_path: Path, loses_database: bool) -> None:
    config, server = with_batches(tmp_path), FakeTei()
    batch = await stop_midway(boot, config, server, calls_max=6)
    store = SqliteJobStore(tmp_path / "batches.sqlite")
    # What the gateway had begun is free for others at once, and not only after the lease.
    assert (await store.queue_of(batch)).is_idle
    await store.aclose()
    if loses_database:
        lose_database(tmp_path)
    async with boot(only(server), config) as gateway:
        end = await ended(gateway, batch)
        output = await results(gateway, end["output_file_id"])

    assert [item["custom_id"] for item in output] == [f"id-{n}" for n in range(500)]
    # Results that were in a journal were not computed again.
    inputs = [text for _, body in server.requests for text in body["input"]]
    assert len(inputs) < 600


async def test_a_batch_whose_plan_is_lost_fails(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    monkeypatch.setattr("gateway.batches.runner.FAILURE_PAUSE_S", 0.01)
    config = with_batches(tmp_path)
    batch = await stop_midway(boot, config, FakeTei(), calls_max=0)
    (tmp_path / JOB_PLAN.format(batch)).unlink()
    async with boot(servers(), config) as gateway:
        end = await ended(gateway, batch)

    assert end["status"] == "failed"
    assert [error["code"] for error in end["errors"]["data"]] == ["internal_error"]


async def test_a_try_that_goes_on_after_others_have_ended_its_job_counts_no_bytes(
    boot: Boots, tmp_path: Path
) -> None:
    server = FakeTei()
    others_are_done = hold(server)
    store = SqliteJobStore(tmp_path / "batches.sqlite")
    async with boot(only(server), with_batches(tmp_path)) as gateway:
        id_ = await submit(gateway, texts(2000))
        await until(lambda: server.requests)
        row = await store.get(id_)
        assert row is not None
        job, nothing = job_of(row), dict.fromkeys(PARTS, 0)
        objects = FolderObjects(tmp_path)
        for number in range(job.chunks):
            mark = msgspec.json.encode(ChunkResult("another", Counts(), nothing))
            await objects.create(CHUNK_MARK.format(id_, number), mark)
        final = FinalRecord(job.ended(Counts(), nothing, 1.0))
        await objects.create(JOB_FINAL.format(id_), msgspec.json.encode(final))
        await store.put(job_row(final.job))
        await store.drop(id_)

        async def has_no_rows() -> bool:
            return not any([await store.get(chunk_row_id(id_, number)) for number in range(job.chunks)])

        assert not await has_no_rows()
        others_are_done.set()
        await until(has_no_rows)
    await store.aclose()

    # Some chunks had not begun here: those that had would have ended the job once more.
    assert job.chunks == 16


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let upkeep look and sweep often."""
    monkeypatch.setattr("gateway.batches.service.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.batches.service.SWEEP_EVERY_S", 0.02)


async def test_removes_what_has_expired(boot: Boots, tmp_path: Path, often: None) -> None:
    async with boot(servers(), with_batches(tmp_path, keep_s=0.5)) as gateway:

        async def has_none() -> bool:
            replies = [await gateway.client.get(path) for path in ("/v1/batches", "/v1/files")]
            return not any(reply.json()["data"] for reply in replies)

        await run(gateway, texts(5))
        await until(has_none)

    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}  # noqa: ASYNC240
    assert left - {"batches.sqlite-wal", "batches.sqlite-shm"} == {IDENTITY, "batches.lock", "batches.sqlite"}


async def test_forgets_uploads_of_killed_gateways(
    boot: Boots, tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.service.UNFINISHED_S", 0.3)
    sent = asyncio.Event()

    async def body() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"y" * 500
        sent.set()
        await asyncio.sleep(3600)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    config = with_batches(tmp_path, tenant_bytes=2 * FILE_BYTES + 1000, file_bytes=900)
    async with boot(servers(), config) as gateway:

        async def has_room() -> bool:
            form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"z" * 800}}
            return (await gateway.client.post("/v1/files", **form)).status_code == 200

        upload_task = asyncio.create_task(gateway.client.post("/v1/files", content=body(), headers=headers))
        await sent.wait()
        assert not await has_room()
        await until(has_room)
        upload_task.cancel()
        await asyncio.gather(upload_task, return_exceptions=True)

    assert json.loads((tmp_path / IDENTITY).read_bytes())


async def test_time_without_progress_is_shown_until_the_batch_ends(boot: Boots, tmp_path: Path) -> None:
    server = FakeTei()
    release = hold(server)
    async with boot(only(server), with_batches(tmp_path)) as gateway:

        async def idle_s() -> float:
            text = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text
            return float(re.findall(r"^gateway_batch_idle_seconds (\S+)$", text, re.MULTILINE)[0])

        async def is_none_idle() -> bool:
            return not await idle_s()

        assert await is_none_idle()
        batch = await submit(gateway, texts(5))
        await until(idle_s)
        release.set()
        await ended(gateway, batch)
        await until(is_none_idle)
