"""Upkeep of files and batches: what was lost is read again, what has expired is removed."""

import asyncio
import json
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
from tests.api.test_batches import create, ended, results, servers, texts, upload, with_batches
from tests.conftest import Boots, Running
from tests.fakes.tei import FakeTei


def lose_database(folder: Path) -> None:
    for path in folder.glob("batches.sqlite*"):
        path.unlink()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def has_room(gateway: Running) -> bool:
    fields, files = {"purpose": "batch"}, {"file": b"z" * 800}
    return (await gateway.client.post("/v1/files", data=fields, files=files)).status_code == 200


async def run(gateway: Running, lines: int = 5) -> Any:
    """Return a batch that has completed."""
    return await ended(gateway, (await create(gateway, (await upload(gateway, texts(lines)))["id"]))["id"])


async def test_a_lost_database_is_built_again_from_the_files(boot: Boots, tmp_path: Path) -> None:
    config = with_batches(tmp_path)
    async with boot(servers(), config) as gateway:
        before = [await run(gateway) for _ in range(3)]
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


async def stop_midway(boot: Boots, config: str, server: FakeTei, calls_max: int) -> Any:
    """Return a batch of 500 lines whose gateway stops when the server has answered so many calls."""
    calls, held = 0, asyncio.Event()

    async def hold(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > calls_max:
            held.set()
            await asyncio.sleep(3600)

    async with boot({"tei-0": server, "rerank-0": FakeTei()}, config) as gateway:
        server.hook = hold
        batch = await create(gateway, (await upload(gateway, texts(500)))["id"])
        async with asyncio.timeout(10):
            await held.wait()
    server.hook = None
    return batch


async def test_a_batch_goes_on_without_its_database(boot: Boots, tmp_path: Path) -> None:
    config, server = with_batches(tmp_path), FakeTei()
    batch = await stop_midway(boot, config, server, calls_max=6)
    lose_database(tmp_path)
    async with boot({"tei-0": server, "rerank-0": FakeTei()}, config) as gateway:
        end = await ended(gateway, batch["id"])
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
    (tmp_path / JOB_PLAN.format(batch["id"])).unlink()
    async with boot(servers(), config) as gateway:
        end = await ended(gateway, batch["id"])

    assert end["status"] == "failed"
    assert [error["code"] for error in end["errors"]["data"]] == ["internal_error"]


async def test_a_try_that_goes_on_after_others_have_ended_its_job_counts_no_bytes(
    boot: Boots, tmp_path: Path
) -> None:
    server, is_held, others_are_done = FakeTei(), asyncio.Event(), asyncio.Event()

    async def hold(*_: Any) -> None:
        is_held.set()
        await others_are_done.wait()

    store = SqliteJobStore(tmp_path / "batches.sqlite")
    async with boot({"tei-0": server, "rerank-0": FakeTei()}, with_batches(tmp_path)) as gateway:
        server.hook = hold
        id_ = (await create(gateway, (await upload(gateway, texts(2000)))["id"]))["id"]
        async with asyncio.timeout(10):
            await is_held.wait()
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
        rows = [chunk_row_id(id_, number) for number in range(job.chunks)]
        assert any([await store.get(name) for name in rows])
        others_are_done.set()
        async with asyncio.timeout(10):
            while any([await store.get(name) for name in rows]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await store.aclose()

    # Some chunks had not begun here: those that had would have ended the job once more.
    assert job.chunks == 16


async def test_removes_what_has_expired(boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.service.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.batches.service.SWEEP_EVERY_S", 0.02)
    async with boot(servers(), with_batches(tmp_path, keep_s=0.5)) as gateway:
        await run(gateway)
        async with asyncio.timeout(10):
            while (await gateway.client.get("/v1/batches")).json()["data"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while (await gateway.client.get("/v1/files")).json()["data"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    assert names_in(tmp_path) - {"batches.sqlite-wal", "batches.sqlite-shm"} == {
        IDENTITY,
        "batches.sqlite",
    }


async def test_forgets_uploads_of_killed_gateways(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.service.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.batches.service.SWEEP_EVERY_S", 0.02)
    monkeypatch.setattr("gateway.batches.service.UNFINISHED_S", 0.3)
    sent = asyncio.Event()

    async def body() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"y" * 500
        sent.set()
        await asyncio.sleep(3600)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with boot(
        servers(), with_batches(tmp_path, tenant_bytes=2 * FILE_BYTES + 1000, file_bytes=900)
    ) as gateway:
        upload_task = asyncio.create_task(gateway.client.post("/v1/files", content=body(), headers=headers))
        await sent.wait()
        async with asyncio.timeout(10):
            while not await has_room(gateway):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        upload_task.cancel()
        await asyncio.gather(upload_task, return_exceptions=True)

    assert json.loads((tmp_path / IDENTITY).read_bytes())
