"""Batches of one tenant that cannot go on, next to those of another one, which can."""

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.jobs import Jobs
from gateway.batches.journal import HEADER_BYTES
from gateway.batches.lines import RunLine, split_chunk, unexecuted_bytes
from gateway.batches.runner import FAILURES_MAX, ChunkRun, ResultBytes
from gateway.batches.store import CHUNK_BYTES, COPIES, FILE_BYTES, JOB_BYTES, StorageFull
from gateway.errors import Unauthenticated
from gateway.tenants.keyring import Keyring, Tenant, key_digest
from tests.api.test_batches import (
    OVERLOADED,
    create,
    ended,
    line,
    results,
    servers,
    shown_of,
    tenants,
    texts,
    upload,
    with_batches,
)
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei

JOBS = 8
LINES_IN_FLIGHT = 4
# At least what the record of a batch counts.
COPIES_BYTES = COPIES * 1000
# At least what the records of a batch of 600 lines count, with their results if none of them runs.
UNEXECUTED_BYTES = sum(unexecuted_bytes(f"id-{number}") for number in range(600))
RECORD_BYTES = JOB_BYTES + 5 * CHUNK_BYTES + COPIES_BYTES + UNEXECUTED_BYTES


def as_tenant(gateway: Running, key: str) -> None:
    gateway.client.headers["authorization"] = f"Bearer {key}"


async def begin_many(gateway: Running, content: str, endpoint: str = "/v1/embeddings") -> list[str]:
    """Create more jobs than there are slots for chunks; return when their lines wait."""
    file = (await upload(gateway, content))["id"]
    jobs = [(await create(gateway, file, endpoint))["id"] for _ in range(JOBS)]
    async with asyncio.timeout(20):
        while any([(await shown_of(gateway, job))["status"] == "validating" for job in jobs]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return jobs


async def check_other_tenant_runs(gateway: Running) -> None:
    as_tenant(gateway, "other")
    end = await ended(gateway, (await create(gateway, (await upload(gateway, line("a", "hi")))["id"]))["id"])
    assert (end["status"], end["request_counts"]["completed"]) == ("completed", 1)
    as_tenant(gateway, KEY)


async def check_reason(gateway: Running, jobs: list[str], text: str) -> None:
    """Check that the owner of batches reads why they wait, until all of them do."""
    async with asyncio.timeout(20):
        while not all([text in str((await shown_of(gateway, job))["wait_reason"]) for job in jobs]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def check_cancel_ends(gateway: Running, jobs: list[str]) -> None:
    for job in jobs:
        assert (await gateway.post(f"/v1/batches/{job}/cancel", {})).status_code == 200
    for job in jobs:
        end = await ended(gateway, job)
        assert end["status"] == "cancelled"
        assert end["request_counts"]["completed"] + end["request_counts"]["failed"] == 600


async def test_an_upstream_that_is_down_holds_up_its_own_batches_only(boot: Boots, tmp_path: Path) -> None:
    async def fail(*_: Any) -> tuple[int, bytes]:
        return OVERLOADED

    down = FakeTei(kind="reranker")
    down.hook = fail
    body = {"model": "cross", "query": "q", "documents": ["a", "b"]}
    content = "\n".join(
        json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": "/v2/rerank", "body": body})
        for n in range(600)
    )
    async with boot({**servers(), "rerank-0": down}, with_batches(tmp_path) + tenants()) as gateway:
        jobs = await begin_many(gateway, content, "/v2/rerank")
        await check_reason(gateway, jobs[:1], "no replica")
        await check_other_tenant_runs(gateway)
        await check_cancel_ends(gateway, jobs)


async def test_a_spent_limit_holds_up_its_own_tenant_only(boot: Boots, tmp_path: Path) -> None:
    config = with_batches(tmp_path) + tenants(requests_per_day=40, batch_tokens_per_day=20)
    async with boot(servers(), config) as gateway:
        jobs = await begin_many(gateway, texts(600))
        await check_reason(gateway, jobs, "batch_tokens_per_day")
        await check_other_tenant_runs(gateway)
        await check_cancel_ends(gateway, jobs)


async def test_a_cancelled_batch_does_not_wait_for_the_lines_of_another(boot: Boots, tmp_path: Path) -> None:
    held, released, upstreams = asyncio.Event(), asyncio.Event(), servers()

    async def hold(*_: Any) -> None:
        held.set()
        await released.wait()

    for upstream in upstreams.values():
        upstream.hook = hold
    config = with_batches(tmp_path, lines_in_flight=1) + tenants()
    async with boot(upstreams, config) as gateway:
        first = (await create(gateway, (await upload(gateway, texts(600)))["id"]))["id"]
        await held.wait()
        await check_cancel_ends(gateway, await begin_many(gateway, texts(600)))
        still_runs = (await shown_of(gateway, first))["status"]
        released.set()
        end = await ended(gateway, first)
    assert (still_runs, end["request_counts"]["completed"]) == ("in_progress", 600)


async def test_cancelled_batches_stay_within_the_bounds(boot: Boots, tmp_path: Path) -> None:
    # Each result of a line that is never run is as long as the line.
    content = "\n".join(line("\u0001" * 500 + str(number), "hi") for number in range(600))
    tenant_bytes = 8_000_000
    config = with_batches(tmp_path, tenant_bytes=tenant_bytes, file_bytes=len(content)) + tenants()
    released, upstreams = asyncio.Event(), servers()

    async def hold(*_: Any) -> None:
        await released.wait()

    for upstream in upstreams.values():
        upstream.hook = hold
    async with boot(upstreams, config) as gateway:
        jobs = await begin_many(gateway, content)
        for job in jobs:
            await gateway.post(f"/v1/batches/{job}/cancel", {})
        released.set()
        ends = [await ended(gateway, job) for job in jobs]
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # noqa: ASYNC240
    codes = [end["errors"]["data"][0]["code"] for end in ends if end["status"] == "failed"]
    assert {"cancelled"} == {end["status"] for end in ends} - {"failed"}
    assert {"storage_full"} == set(codes)
    assert stored < tenant_bytes


async def test_a_full_store_holds_up_its_own_tenant_only(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = texts(600)
    # The results of one batch alone take more than is left.
    tenant_bytes = len(content) + FILE_BYTES + JOBS * RECORD_BYTES
    # Lines reserve byte by byte, and leave the room of the records of later batches.
    monkeypatch.setattr("gateway.batches.runner.RESERVE_BYTES", tenant_bytes)
    config = with_batches(tmp_path, tenant_bytes=tenant_bytes, file_bytes=len(content)) + tenants()
    begun, upstreams = asyncio.Event(), servers()

    async def hold(*_: Any) -> None:
        await begun.wait()

    for upstream in upstreams.values():
        # Results would take the room of the records of later batches.
        upstream.hook = hold
    async with boot(upstreams, config) as gateway:
        jobs = await begin_many(gateway, content)
        begun.set()
        await check_reason(gateway, jobs, f"your files and batches take all of the {tenant_bytes} bytes")
        await check_other_tenant_runs(gateway)
        await check_cancel_ends(gateway, jobs)


async def test_a_full_store_is_not_written_to_and_a_batch_goes_on_afterwards(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MAX_S", 0.1)
    content, room = texts(600), 20_000
    filler = "x" * 2_000_000
    tenant_bytes = len(content) + len(filler) + 2 * FILE_BYTES + RECORD_BYTES + room
    config = with_batches(
        tmp_path, tenant_bytes=tenant_bytes, file_bytes=len(filler), lines_in_flight=LINES_IN_FLIGHT
    )
    waits = asyncio.Event()
    note_wait(monkeypatch, waits)
    async with boot(servers(), config) as gateway:
        stored = (await upload(gateway, filler))["id"]
        job = (await create(gateway, (await upload(gateway, content))["id"]))["id"]
        async with asyncio.timeout(20):
            await waits.wait()
        journals = sum(path.stat().st_size for path in (tmp_path / "journals").iterdir())
        await gateway.client.delete(f"/v1/files/{stored}")
        end = await ended(gateway, job)
        output = (await gateway.client.get(f"/v1/files/{end['output_file_id']}/content")).content

    sizes = [len(result) for result in output.splitlines(keepends=True)]
    # A line begins while there is room for a byte. Those that run together may therefore all end beyond it.
    most = room + COPIES_BYTES + LINES_IN_FLIGHT * max(sizes)
    assert journals <= most + HEADER_BYTES * (most // min(sizes))
    assert end["request_counts"] == {"total": 600, "completed": 600, "failed": 0}


def note_wait(monkeypatch: pytest.MonkeyPatch, waits: asyncio.Event) -> None:
    """Set an event when a chunk finds no room for its results."""
    reserve = ResultBytes.reserve

    async def noting(self: ResultBytes) -> None:
        try:
            await reserve(self)
        except StorageFull:
            waits.set()
            raise

    monkeypatch.setattr(ResultBytes, "reserve", noting)


async def test_a_line_that_is_nested_too_deeply_fails_the_batch_with_its_number(
    boot: Boots, tmp_path: Path
) -> None:
    deep = line("deep", "a", x=None).replace("null", "[" * 950 + "]" * 950)
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        end = await ended(
            gateway, (await create(gateway, (await upload(gateway, texts(2) + "\n" + deep))["id"]))["id"]
        )

    assert end["status"] == "failed"
    assert [(item["code"], item["line"]) for item in end["errors"]["data"]] == [("invalid_json_line", 3)]


async def test_an_unexpected_failure_is_tried_again(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    tries = itertools.count(1)

    def split(data: bytes) -> list[RunLine]:
        if next(tries) < 3:
            raise ValueError
        return split_chunk(data)

    monkeypatch.setattr("gateway.batches.runner.split_chunk", split)
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        end = await ended(gateway, (await create(gateway, (await upload(gateway, texts(9)))["id"]))["id"])

    assert end["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


async def test_lines_of_a_chunk_that_always_fails_get_an_error(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    tries = itertools.count(1)

    async def fail(self: ChunkRun, *_: Any) -> None:
        del self
        next(tries)
        raise ValueError

    monkeypatch.setattr(ChunkRun, "_try", fail)
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        end = await ended(gateway, (await create(gateway, (await upload(gateway, texts(1)))["id"]))["id"])
        errors = await results(gateway, end["error_file_id"])

    assert next(tries) == FAILURES_MAX + 1
    assert end["status"] == "completed"
    assert [(item["custom_id"], item["error"]["code"]) for item in errors] == [("id-0", "internal_error")]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["gone", "cut"])
@pytest.mark.parametrize("cancels", [False, True])
async def test_a_batch_whose_input_is_lost_ends(
    boot: Boots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    cancels: bool,
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    monkeypatch.setattr("gateway.batches.runner.FAILURE_PAUSE_S", 0.01)
    read = ChunkRun._read
    lost = asyncio.Event()

    async def read_after_loss(self: ChunkRun) -> list[RunLine]:
        await lost.wait()
        return await read(self)

    monkeypatch.setattr(ChunkRun, "_read", read_after_loss)
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        file = (await upload(gateway, texts(200)))["id"]
        batch = (await create(gateway, file))["id"]
        async with asyncio.timeout(20):
            while (await shown_of(gateway, batch))["status"] == "validating":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        damage(tmp_path / "files" / f"{file}.data")
        if cancels:
            await gateway.post(f"/v1/batches/{batch}/cancel", {})
        lost.set()
        end = await ended(gateway, batch)
        errors = await results(gateway, end["error_file_id"])

    assert end["status"] == ("cancelled" if cancels else "completed")
    counts = {"total": 200, "completed": 0, "failed": 200} | ({"unexecuted": 200} if cancels else {})
    assert end["request_counts"] == counts
    assert {item["error"]["code"] for item in errors} == {"batch_cancelled" if cancels else "internal_error"}


async def test_a_batch_whose_validation_always_fails_ends(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)

    async def fail(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(Jobs, "_check_input", fail)
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        end = await ended(gateway, (await create(gateway, (await upload(gateway, texts(1)))["id"]))["id"])

    assert end["status"] == "failed"
    assert [item["code"] for item in end["errors"]["data"]] == ["internal_error"]


def keys_of(*names: str) -> str:
    """Return tenants of which `acme` has a key with the id `ci`, made of each name."""
    keys = [{"id": "ci" if n == 0 else f"k{n}", "digest": key_digest(name)} for n, name in enumerate(names)]
    return f"tenants: {json.dumps({'acme': {'keys': keys}})}\n"


async def test_a_new_key_of_the_same_id_does_not_go_on_with_the_batch_of_a_revoked_one(
    boot: Boots, tmp_path: Path
) -> None:
    server, held = FakeTei(), asyncio.Event()

    async def hold(*_: Any) -> None:
        await held.wait()

    server.hook = hold
    config = with_batches(tmp_path, lines_in_flight=4)
    async with boot({"tei-0": server, "rerank-0": FakeTei()}, config + keys_of(KEY)) as gateway:
        batch = await create(gateway, (await upload(gateway, texts(50)))["id"])
        async with asyncio.timeout(10):
            while not server.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        gateway.follow(config + keys_of("rotated"))
        as_tenant(gateway, "rotated")
        held.set()
        end = await ended(gateway, batch["id"])
        errors = await results(gateway, end["error_file_id"])

    assert len(errors) >= 46
    assert {item["response"]["status_code"] for item in errors} == {401}


async def test_a_batch_waits_for_a_gateway_that_does_not_know_its_new_key_yet(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    unknown = itertools.count(1)
    find = Keyring.owner_by_id

    def late(self: Keyring, tenant: str, key_id: str, mark: str = "") -> Tenant:
        # Only lines and validation name the key's mark.
        if mark and next(unknown) < 20:
            raise Unauthenticated("unknown")
        return find(self, tenant, key_id, mark)

    config = with_batches(tmp_path) + tenants()
    async with boot(servers(), config) as gateway:
        gateway.application.gateway.keyring.has_store = True
        monkeypatch.setattr(Keyring, "owner_by_id", late)
        end = await ended(gateway, (await create(gateway, (await upload(gateway, texts(30)))["id"]))["id"])

    assert end["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
