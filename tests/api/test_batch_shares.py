"""Batches of one tenant that cannot go on, next to those of another one, which can."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.jobs import Jobs
from gateway.batches.journal import HEADER_BYTES
from gateway.batches.lines import RunLine, split_chunk, unexecuted_bytes
from gateway.batches.records import Chunk
from gateway.batches.runner import FAILURES_MAX, ChunkRun
from gateway.batches.store import CHUNK_BYTES, COPIES, FILE_BYTES, JOB_BYTES
from gateway.errors import Unauthenticated
from gateway.tenants.keyring import Keyring, Tenant, key_digest
from tests.batches import (
    OVERLOADED,
    cancel,
    create,
    ended,
    hold,
    line,
    only,
    results,
    run,
    servers,
    shown_of,
    submit,
    tenants,
    texts,
    until,
    upload,
    use_key,
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


@pytest.fixture
async def gateway(boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """Serve batches whose tries follow each other soon."""
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    monkeypatch.setattr("gateway.batches.runner.FAILURE_PAUSE_S", 0.01)
    async with boot(servers(), with_batches(tmp_path) + tenants()) as running:
        yield running


async def is_validated(gateway: Running, job: str) -> bool:
    return bool((await shown_of(gateway, job))["status"] != "validating")


async def begin_many(gateway: Running, content: str, endpoint: str = "/v1/embeddings") -> list[str]:
    """Create more jobs than there are places for chunks; return when their lines wait."""
    file = (await upload(gateway, content))["id"]
    jobs = [(await create(gateway, file, endpoint=endpoint))["id"] for _ in range(JOBS)]
    for job in jobs:
        await until(lambda job=job: is_validated(gateway, job))  # type: ignore[misc]
    return jobs


async def check_other_tenant_runs(gateway: Running) -> None:
    use_key(gateway, "other")
    end = await run(gateway, line("a", "hi"))
    assert (end["status"], end["request_counts"]["completed"]) == ("completed", 1)
    use_key(gateway, KEY)


async def check_reason(gateway: Running, jobs: list[str], text: str) -> None:
    """Check that the owner of batches reads why they wait, until all of them do."""

    async def all_wait() -> bool:
        return all([text in str((await shown_of(gateway, job))["wait_reason"]) for job in jobs])

    await until(all_wait)


async def check_cancel_ends(gateway: Running, jobs: list[str]) -> None:
    for job in jobs:
        assert (await cancel(gateway, job)).status_code == 200
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
    async with boot(servers(rerank_0=down), with_batches(tmp_path) + tenants()) as gateway:
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
    upstreams = servers()
    released = hold(*upstreams.values())
    config = with_batches(tmp_path, lines_in_flight=1) + tenants()
    async with boot(upstreams, config) as gateway:
        first = await submit(gateway, texts(600))
        await until(lambda: any(upstream.requests for upstream in upstreams.values()))
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
    upstreams = servers()
    released = hold(*upstreams.values())
    async with boot(upstreams, config) as gateway:
        jobs = await begin_many(gateway, content)
        for job in jobs:
            await cancel(gateway, job)
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
    upstreams = servers()
    # Results would take the room of the records of later batches.
    begun = hold(*upstreams.values())
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
    async with boot(servers(), config) as gateway:
        stored = (await upload(gateway, filler))["id"]
        job = await submit(gateway, content)
        await check_reason(gateway, [job], "your files and batches take all")
        journals = sum(path.stat().st_size for path in (tmp_path / "journals").iterdir())
        await gateway.client.delete(f"/v1/files/{stored}")
        end = await ended(gateway, job)
        output = (await gateway.client.get(f"/v1/files/{end['output_file_id']}/content")).content

    sizes = [len(result) for result in output.splitlines(keepends=True)]
    # A line begins while there is room for a byte. Those that run together may therefore all end beyond it.
    most = room + COPIES_BYTES + LINES_IN_FLIGHT * max(sizes)
    assert journals <= most + HEADER_BYTES * (most // min(sizes))
    assert end["request_counts"] == {"total": 600, "completed": 600, "failed": 0}


async def test_a_line_that_is_nested_too_deeply_fails_the_batch_with_its_number(
    gateway: Running,
) -> None:
    deep = line("deep", "a", x=None).replace("null", "[" * 950 + "]" * 950)
    end = await run(gateway, texts(2) + "\n" + deep)

    assert end["status"] == "failed"
    assert [(item["code"], item["line"]) for item in end["errors"]["data"]] == [("invalid_json_line", 3)]


async def test_an_unexpected_failure_is_tried_again(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = itertools.count(1)

    def split(data: bytes) -> list[RunLine]:
        if next(tries) < 3:
            raise ValueError
        return split_chunk(data)

    monkeypatch.setattr("gateway.batches.runner.split_chunk", split)
    end = await run(gateway, texts(9))

    assert end["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


async def test_lines_of_a_chunk_that_always_fails_get_an_error(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = itertools.count(1)

    async def fail(self: ChunkRun, *_: Any) -> None:
        del self
        next(tries)
        raise ValueError

    monkeypatch.setattr(ChunkRun, "_try", fail)
    end = await run(gateway, texts(1))
    errors = await results(gateway, end["error_file_id"])

    assert next(tries) == FAILURES_MAX + 1
    assert end["status"] == "completed"
    assert [(item["custom_id"], item["error"]["code"]) for item in errors] == [("id-0", "internal_error")]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["gone", "cut"])
@pytest.mark.parametrize("cancels", [False, True])
async def test_a_batch_whose_input_is_lost_ends(
    gateway: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    cancels: bool,
) -> None:
    read = ChunkRun._read
    lost = asyncio.Event()

    async def read_after_loss(self: ChunkRun, chunk: Chunk) -> list[RunLine]:
        await lost.wait()
        return await read(self, chunk)

    monkeypatch.setattr(ChunkRun, "_read", read_after_loss)
    file = (await upload(gateway, texts(200)))["id"]
    batch = (await create(gateway, file))["id"]
    await until(lambda: is_validated(gateway, batch))
    damage(tmp_path / "files" / f"{file}.data")
    if cancels:
        await cancel(gateway, batch)
    lost.set()
    end = await ended(gateway, batch)
    errors = await results(gateway, end["error_file_id"])

    assert end["status"] == ("cancelled" if cancels else "completed")
    counts = {"total": 200, "completed": 0, "failed": 200} | ({"unexecuted": 200} if cancels else {})
    assert end["request_counts"] == counts
    assert {item["error"]["code"] for item in errors} == {"batch_cancelled" if cancels else "internal_error"}


async def test_a_batch_whose_validation_always_fails_ends(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(Jobs, "_check_input", fail)
    end = await run(gateway, texts(1))

    assert end["status"] == "failed"
    assert [item["code"] for item in end["errors"]["data"]] == ["internal_error"]


def keys_of(*names: str) -> str:
    """Return tenants of which `acme` has a key with the id `ci`, made of each name."""
    keys = [{"id": "ci" if n == 0 else f"k{n}", "digest": key_digest(name)} for n, name in enumerate(names)]
    return f"tenants: {json.dumps({'acme': {'keys': keys}})}\n"


async def test_a_new_key_of_the_same_id_does_not_go_on_with_the_batch_of_a_revoked_one(
    boot: Boots, tmp_path: Path
) -> None:
    server = FakeTei()
    released = hold(server)
    config = with_batches(tmp_path, lines_in_flight=4)
    async with boot(only(server), config + keys_of(KEY)) as gateway:
        batch = await submit(gateway, texts(50))
        await until(lambda: server.requests)
        gateway.follow(config + keys_of("rotated"))
        use_key(gateway, "rotated")
        released.set()
        end = await ended(gateway, batch)
        errors = await results(gateway, end["error_file_id"])

    assert len(errors) >= 46
    assert {item["response"]["status_code"] for item in errors} == {401}


async def test_a_batch_waits_for_a_gateway_that_does_not_know_its_new_key_yet(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = itertools.count(1)
    find = Keyring.owner_by_id

    def late(self: Keyring, tenant: str, key_id: str, mark: str = "") -> Tenant:
        # Only lines and validation name the key's mark.
        if mark and next(unknown) < 20:
            raise Unauthenticated("unknown")
        return find(self, tenant, key_id, mark)

    gateway.application.gateway.keyring.has_store = True
    monkeypatch.setattr(Keyring, "owner_by_id", late)
    end = await run(gateway, texts(30))

    assert end["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
