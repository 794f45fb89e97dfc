"""Files and batches of OpenAI's API, from the upload to the results, over the whole application."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from gateway.batches.store import FILE_BYTES, JOB_BYTES, PAGE_BYTES
from gateway.events import BatchChanged, CallFinished
from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.batches import (
    OVERLOADED,
    REQUEST,
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
from tests.fakes.tei import FakeTei, vector_of


@pytest.fixture
async def gateway(boot: Boots, tmp_path: Path) -> AsyncIterator[Running]:
    async with boot(servers(), with_batches(tmp_path)) as running:
        yield running


def client_of(gateway: Running, key: str = KEY) -> openai.AsyncOpenAI:
    """Return the real client over the application."""
    transport = httpx.ASGITransport(gateway.application.asgi)
    http_client = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, http_client=http_client)


async def test_runs_a_batch_with_the_real_client(  # noqa: PLR0915 - the life of one batch
    boot: Boots, tmp_path: Path
) -> None:
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        client = client_of(gateway)
        content = texts(300).encode()
        file = await client.files.create(
            file=("input.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content),
            "input.jsonl",
            "batch",
            "processed",
        )
        assert file.expires_at == file.created_at + 7200
        assert (await client.files.content(file.id)).read() == content
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"night": "1"},
        )
        assert batch.status == "validating"
        assert batch.expires_at == batch.created_at + 24 * 3600
        end = await client.batches.retrieve((await ended(gateway, batch.id))["id"])
        assert end.output_file_id is not None
        output = (await client.files.content(end.output_file_id)).text
        assert [item.id async for item in client.files.list(purpose="batch_output")] == [end.output_file_id]
        assert [item.id async for item in client.batches.list(limit=1)] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        assert (await client.files.delete(end.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(end.output_file_id)

    assert end.status == "completed"
    assert end.request_counts is not None
    assert end.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
    assert (end.error_file_id, end.metadata, end.model) == (None, {"night": "1"}, "bge")
    assert None not in (end.in_progress_at, end.finalizing_at, end.completed_at)
    lines = [json.loads(text) for text in output.splitlines()]
    assert end.usage is not None
    assert end.usage.total_tokens == sum(item["response"]["body"]["usage"]["total_tokens"] for item in lines)
    assert [item["custom_id"] for item in lines] == [f"id-{number}" for number in range(300)]
    for number, item in enumerate(lines):
        embedding = item["response"]["body"]["data"][0]["embedding"]
        np.testing.assert_allclose(vector_of(f"text {number}"), embedding, rtol=1e-6)
    statuses = [event.status for event in gateway.events if isinstance(event, BatchChanged)]
    assert statuses == ["validating", "in_progress", "completed"]
    calls = [event for event in gateway.events if isinstance(event, CallFinished) and event.tokens]
    assert {call.route for call in calls} == {"/v1/embeddings (batch)"}


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n\r\n", "\n \n"])
async def test_a_file_may_have_blank_lines(gateway: Running, end: str) -> None:
    batch = await run(gateway, "\n" + texts(3).replace("\n", "\n\n", 1) + end)
    found = await results(gateway, batch["output_file_id"])

    assert ("completed", 3) == (batch["status"], batch["request_counts"]["completed"])
    assert ["id-0", "id-1", "id-2"] == [item["custom_id"] for item in found]


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v2/rerank", {"model": "cross", "query": "q", "documents": ["a", "b"]}, "results"),
        ("/score", {"model": "cross", "queries": "q", "documents": ["a", "b"]}, "data"),
    ],
)
async def test_runs_reranks_and_scores(
    endpoint: str, body: dict[str, Any], field: str, boot: Boots, tmp_path: Path
) -> None:
    content = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    async with boot(servers(rerank_0=FakeTei(kind="reranker")), with_batches(tmp_path)) as gateway:
        alone = (await gateway.post(endpoint, body)).json()
        end = await run(gateway, content, endpoint=endpoint)
        lines = await results(gateway, end["output_file_id"])

    assert end["status"] == "completed", end
    assert lines[0]["response"]["body"][field] == alone[field]


async def test_errors_of_lines_are_in_the_error_file(gateway: Running) -> None:
    lines = [
        line("good", "a"),
        line("none", ""),
        line("odd", "b", dimensions=-1),
        line("bytes", "c", encoding_format="bytes"),
    ]
    end = await run(gateway, "\n".join(lines))
    output = await results(gateway, end["output_file_id"])
    errors = await results(gateway, end["error_file_id"])

    assert end["status"] == "completed"
    assert end["request_counts"]["total"] == 4
    assert sorted(item["custom_id"] for item in output + errors) == ["bytes", "good", "none", "odd"]
    for item in errors:
        assert item["response"]["status_code"] == 400
        assert item["response"]["request_id"]
        assert item["response"]["body"]["error"]["message"]
        assert item["error"] is None


async def test_lines_name_unknown_fields_too(boot: Boots, tmp_path: Path) -> None:
    lines = "\n".join([line("known", "a"), line("unknown", "b", dimension=3)])
    async with boot(servers(), with_batches(tmp_path)) as gateway:
        output = await results(gateway, (await run(gateway, lines))["output_file_id"])
    refusing = with_batches(tmp_path / "refusing") + "limits: {unknown_fields: refuse}\n"
    async with boot(servers(), refusing) as gateway:
        (refused,) = await results(gateway, (await run(gateway, lines))["error_file_id"])

    assert {"known": None, "unknown": "dimension"} == {
        item["custom_id"]: item["response"].get("ignored_fields") for item in output
    }
    assert "did you mean `dimensions`?" in refused["response"]["body"]["error"]["message"]


async def test_a_broken_file_fails_with_the_line(gateway: Running) -> None:
    broken = [line("id-0", "again"), line("x", "y").replace("bge", "ada")]
    end = await run(gateway, "\n".join([texts(5), *broken]))

    assert end["status"] == "failed"
    assert end["failed_at"] is not None
    assert [(item["code"], item["line"], item["param"]) for item in end["errors"]["data"]] == [
        ("duplicate_custom_id", 6, "custom_id"),
        ("model_not_found", 7, "body.model"),
    ]


async def test_retries_what_may_pass(boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    server, requests = FakeTei(), itertools.count()

    async def be_late_at_first(*_: Any) -> None:
        if next(requests) < 8:
            await asyncio.sleep(3600)

    server.hook = be_late_at_first
    config = with_batches(tmp_path).replace(
        "bge: {upstream: embedder", "bge: {deadline_s: 0.1, upstream: embedder"
    )
    async with boot(only(server), config) as gateway:
        end = await run(gateway, texts(40))

    assert any(call.outcome == "deadline_exceeded" for call in finished(gateway))
    assert end["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_a_spent_limit_makes_a_job_wait(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MAX_S", 0.05)
    clock = {"us": 1_700_000_000_000_000}
    ledger = MemoryLedger(lambda: clock["us"])
    config = with_batches(tmp_path) + tenants(requests_per_day=42, batch_tokens_per_day=10**6)
    async with boot(servers(), config, ledger=ledger) as gateway:
        batch = await submit(gateway, texts(60))
        await until(lambda: len(answered(gateway)) >= 40)
        status = (await shown_of(gateway, batch))["status"]
        async with client_of(gateway) as client:
            # A field that OpenAI lacks, as its client shows it.
            reasons: list[str] = []

            async def has_reason() -> bool:
                reasons.append((await client.batches.retrieve(batch)).model_extra["wait_reason"])
                return bool(reasons[-1])

            await until(has_reason)
        clock["us"] += 86_400_000_000
        end = await ended(gateway, batch)

    assert status == "in_progress"
    assert "limit requests_per_day (42)" in reasons[-1]
    assert end["wait_reason"] is None
    assert end["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    assert len(answered(gateway)) == 60


async def test_batch_tokens_count_lines_only(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner.PAUSE_MIN_S", 0.01)
    config = with_batches(tmp_path) + tenants(batch_tokens_per_day=100)
    async with boot(servers(), config) as gateway:
        batch = await submit(gateway, texts(60))
        # A line is at most ten tokens.
        await until(lambda: sum(call.tokens for call in answered(gateway)) > 100 - 10)
        reply = await gateway.post("/v1/embeddings", {"model": "bge", "input": "now"})
        usage = (await gateway.client.get("/usage")).json()
        shown = await shown_of(gateway, batch)
        await cancel(gateway, batch)
        end = await ended(gateway, batch)

    assert reply.status_code == 200
    assert shown["status"] == "in_progress"
    assert usage["limits"] == {"batch_tokens_per_day": 100}
    computed = sum(call.tokens for call in answered(gateway))
    assert 100 - 10 < computed <= 100
    assert end["usage"]["total_tokens"] == computed


async def test_a_cancelled_job_keeps_its_results(boot: Boots, tmp_path: Path) -> None:
    server = FakeTei()
    released = hold(server)
    async with boot(only(server), with_batches(tmp_path)) as gateway:
        batch = await submit(gateway, texts(300))
        await until(lambda: server.requests)
        cancelling = (await cancel(gateway, batch)).json()
        released.set()
        end = await ended(gateway, batch)
        output = await results(gateway, end["output_file_id"])
        errors = await results(gateway, end["error_file_id"])
        again = await cancel(gateway, batch)

    assert cancelling["status"] == "cancelling"
    assert end["status"] == "cancelled"
    assert 0 < len(output) < 300
    assert {item["error"]["code"] for item in errors} == {"batch_cancelled"}
    assert end["request_counts"]["unexecuted"] == end["request_counts"]["failed"] == len(errors)
    assert sorted(item["custom_id"] for item in output + errors) == sorted(f"id-{n}" for n in range(300))
    assert again.status_code == 400


async def test_a_job_expires_with_its_window(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.jobs.WINDOW_S", 0.3)

    async def fail(*_: Any) -> tuple[int, bytes]:
        return OVERLOADED

    server = FakeTei()
    server.hook = fail
    async with boot(only(server), with_batches(tmp_path)) as gateway:
        end = await run(gateway, texts(9))
        errors = await results(gateway, end["error_file_id"])

    assert end["status"] == "expired"
    assert end["expired_at"] is not None
    assert [item["custom_id"] for item in errors] == [f"id-{n}" for n in range(9)]
    assert {item["error"]["code"] for item in errors} == {"batch_expired"}


async def test_lines_of_a_revoked_key_fail(boot: Boots, tmp_path: Path) -> None:
    server = FakeTei()
    released = hold(server)
    async with boot(only(server), with_batches(tmp_path) + tenants()) as gateway:
        batch = await submit(gateway, texts(200))
        await until(lambda: server.requests)
        keys = json.dumps({"acme": {"keys": [{"id": "new", "digest": key_digest("new")}]}})
        gateway.follow(with_batches(tmp_path) + f"tenants: {keys}\n")
        use_key(gateway, "new")
        released.set()
        end = await ended(gateway, batch)
        errors = await results(gateway, end["error_file_id"])

    assert end["status"] == "completed"
    assert end["request_counts"]["failed"] == len(errors) > 0
    assert {item["response"]["status_code"] for item in errors} == {401}


async def test_tenants_see_only_their_own(boot: Boots, tmp_path: Path) -> None:
    async with boot(servers(), with_batches(tmp_path) + tenants()) as gateway:
        batch = await run(gateway, texts(3))
        use_key(gateway, "other")
        statuses = await statuses_of(gateway, batch)
        files = (await gateway.client.get("/v1/files")).json()
        batches = (await gateway.client.get("/v1/batches")).json()

    assert statuses == [404] * 9
    assert files == {"data": [], "has_more": False, "first_id": None, "last_id": None, "object": "list"}
    assert batches["data"] == []


NARROW: dict[str, dict[str, Any]] = {
    "tokenizer": {"scopes": ["tokenize"]},
    "ranker": {"scopes": ["rerank"]},
    "other-model": {"models": ["ranker"]},
    "narrow": {"models": ["bge"], "scopes": ["embed"]},
    "narrow-too": {"models": ["bge"], "scopes": ["embed"]},
}


def narrow_keys(**changes: dict[str, Any]) -> str:
    """Return tenants of which one has a key that is not narrowed, and several that are."""
    keys = [{"digest": key_digest(name), "id": name, **(NARROW | changes)[name]} for name in NARROW]
    return f"tenants: {json.dumps({'acme': {'keys': [key_digest(KEY), *keys]}})}\n"


async def statuses_of(gateway: Running, batch: dict[str, Any]) -> list[int]:
    """Return the statuses of all requests for a batch that has ended, and for its files."""
    own = batch["input_file_id"], batch["output_file_id"]
    paths = [f"/v1/files/{file}{end}" for file in own for end in ("", "/content")]
    replies = [await gateway.client.get(path) for path in (*paths, f"/v1/batches/{batch['id']}")]
    replies += [await gateway.client.delete(f"/v1/files/{file}") for file in own]
    replies.append(await cancel(gateway, batch["id"]))
    replies.append(await gateway.post("/v1/batches", REQUEST | {"input_file_id": own[0]}))
    return [reply.status_code for reply in replies]


async def test_narrowed_keys_see_only_their_own(boot: Boots, tmp_path: Path) -> None:
    async with boot(servers(), with_batches(tmp_path) + narrow_keys()) as gateway:
        made = {}
        for key in (KEY, "narrow"):
            use_key(gateway, key)
            made[key] = await run(gateway, texts(3))
        for batch in made.values():
            use_key(gateway, "tokenizer")
            assert [403] * 9 == await statuses_of(gateway, batch)
            assert [403, 403] == [
                (await gateway.client.get(path)).status_code for path in ("/v1/files", "/v1/batches")
            ]
            for key in ("other-model", "narrow-too"):
                use_key(gateway, key)
                assert [404] * 9 == await statuses_of(gateway, batch)
                assert [[], []] == [
                    (await gateway.client.get(path)).json()["data"] for path in ("/v1/files", "/v1/batches")
                ]
            use_key(gateway, "ranker")
            # It may not create a batch of embeddings at all.
            assert [404] * 8 + [403] == await statuses_of(gateway, batch)
        use_key(gateway, "narrow")
        shown = made["narrow"]
        assert [404] * 9 == await statuses_of(gateway, made[KEY])
        files = (await gateway.client.get("/v1/files?limit=1")).json()
        assert (True, shown["output_file_id"]) == (files["has_more"], files["last_id"])
        files = (await gateway.client.get(f"/v1/files?limit=1&after={files['last_id']}")).json()
        assert (False, shown["input_file_id"]) == (files["has_more"], files["last_id"])
        batches = (await gateway.client.get("/v1/batches?limit=1")).json()
        assert (False, [shown["id"]]) == (batches["has_more"], [batch["id"] for batch in batches["data"]])
        assert 3 == len(await results(gateway, shown["output_file_id"]))
        use_key(gateway, KEY)
        assert 4 == len((await gateway.client.get("/v1/files")).json()["data"])
        assert 2 == len((await gateway.client.get("/v1/batches")).json()["data"])
        assert [200] * 7 == (await statuses_of(gateway, shown))[:7]


@pytest.mark.parametrize("change", [{"models": ["ranker"]}, {"models": ["bge"], "scopes": ["rerank"]}])
async def test_results_are_read_only_by_keys_that_may_compute_them(
    boot: Boots, tmp_path: Path, change: dict[str, Any]
) -> None:
    async with boot(servers(), with_batches(tmp_path) + narrow_keys()) as gateway:
        use_key(gateway, "narrow")
        batch = await run(gateway, texts(3))
    async with boot(servers(), with_batches(tmp_path) + narrow_keys(narrow=change)) as gateway:
        use_key(gateway, "narrow")
        reply = await gateway.client.get(f"/v1/files/{batch['output_file_id']}/content")
        own = await gateway.client.get(f"/v1/files/{batch['input_file_id']}/content")
        use_key(gateway, KEY)
        assert 3 == len(await results(gateway, batch["output_file_id"]))

    assert (403, 200) == (reply.status_code, own.status_code)


async def test_operators_see_and_cancel_all(boot: Boots, tmp_path: Path) -> None:
    config = with_batches(tmp_path) + tenants() + f'admin: {{keys: ["{key_digest("operator")}"]}}\n'
    async with boot(servers(), config) as gateway:
        batch = await submit(gateway, texts(3))
        refused = await gateway.client.get("/admin/batches")
        use_key(gateway, "operator")
        shown = (await gateway.client.get("/admin/batches")).json()
        own = await gateway.client.get("/v1/files")
        cancelled = await gateway.post(f"/admin/batches/{batch}/cancel", {})

    assert refused.status_code == 403
    assert [(item["tenant"], item["batch"]["id"]) for item in shown["data"]] == [("acme", batch)]
    assert own.status_code == 403
    assert cancelled.status_code in {200, 400}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "file_id"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 5, "anchor": "created_at"}}, "output_expires_after"),
        ({"output_expires_after": {"seconds": 3600, "anchor": "now"}}, "output_expires_after"),
    ],
)
async def test_refuses_a_batch_that_it_cannot_serve(
    fields: dict[str, Any], param: str, gateway: Running
) -> None:
    file = await upload(gateway, texts(3))
    reply = await gateway.post("/v1/batches", REQUEST | {"input_file_id": file["id"]} | fields)

    assert reply.status_code in {400, 404}
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "files", "headers", "status"),
    [
        ({"purpose": "fine-tune"}, {"file": b"{}"}, {}, 400),
        ({}, {"file": b"{}"}, {}, 400),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, {"file": b"{}"}, {}, 400),
        ({"purpose": "batch", "expires_after[anchor]": "x"}, {"file": b"{}"}, {}, 400),
        ({"purpose": "batch"}, {"other": b"{}"}, {}, 400),
        ({"purpose": "batch", "note": "x" * 20_000}, {"file": b"{}"}, {}, 400),
        ({"purpose": "batch"}, {"file": b"x" * 3000}, {}, 413),
        ({"purpose": "batch"}, {"file": b"{}"}, {"content-type": "application/json"}, 415),
    ],
)
async def test_refuses_an_upload_that_it_cannot_serve(
    data: Any, files: Any, headers: dict[str, str], status: int, boot: Boots, tmp_path: Path
) -> None:
    async with boot(servers(), with_batches(tmp_path, file_bytes=2000)) as gateway:
        reply = await gateway.client.post("/v1/files", data=data, files=files, headers=headers)
        listed = (await gateway.client.get("/v1/files")).json()

    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    assert listed["data"] == []
    assert list((tmp_path / "unfinished").iterdir()) == []


class UnreadBody:
    """Body of an upload of unknown length, which notes when it is read."""

    headers = {"content-type": "multipart/form-data; boundary=x"}  # noqa: RUF012

    def __init__(self) -> None:
        self.is_read = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.is_read = True
        yield b"x"


async def test_refuses_an_upload_before_its_body(boot: Boots, tmp_path: Path) -> None:
    async with boot(servers(), with_batches(tmp_path, file_bytes=2000)) as gateway:
        for headers, status in (
            ({"authorization": "Bearer wrong"}, 401),
            ({"content-length": "100000"}, 413),
        ):
            body = UnreadBody()
            reply = await gateway.client.post("/v1/files", content=body, headers=body.headers | headers)
            assert (reply.status_code, body.is_read) == (status, False)


async def test_uploads_and_batches_cost_a_request_each(boot: Boots, tmp_path: Path) -> None:
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
    body = UnreadBody()
    async with boot(servers(), with_batches(tmp_path) + tenants(requests_per_day=4)) as gateway:
        first = await gateway.client.post("/v1/files", **form)
        file = first.json()["id"]
        bad = await gateway.client.post("/v1/files", data={"purpose": "x"}, files={"file": b"{}"})
        batch = await gateway.post("/v1/batches", REQUEST | {"input_file_id": file})
        missing = await gateway.post("/v1/batches", REQUEST | {"input_file_id": "file-none"})
        spent = [
            await gateway.client.post("/v1/files", content=body, headers=body.headers),
            await gateway.post("/v1/batches", REQUEST | {"input_file_id": file}),
            await gateway.post("/v1/embeddings", {"model": "bge", "input": "now"}),
        ]
        free = [
            await gateway.client.get("/v1/files"),
            await gateway.client.get("/v1/batches"),
            await cancel(gateway, batch.json()["id"]),
            await gateway.client.delete(f"/v1/files/{file}"),
        ]

    replies = [first, bad, batch, missing]
    assert [reply.status_code for reply in replies] == [200, 400, 200, 404]
    remaining = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
    assert remaining == ["3", "2", "1", "0"]
    assert [reply.status_code for reply in spent] == [429] * 3
    assert {reply.headers["x-ratelimit-remaining-requests"] for reply in spent} == {"0"}
    assert not body.is_read
    # The batch waits for its limit, or is cancelled: whichever, these are not refused for the quota.
    assert 429 not in [reply.status_code for reply in free]


async def test_bounds_the_files_of_a_tenant(boot: Boots, tmp_path: Path) -> None:
    config = with_batches(tmp_path, tenant_bytes=2 * FILE_BYTES + 1000, file_bytes=900)
    async with boot(servers(), config) as gateway:
        first = await upload(gateway, "x" * 600)
        reply = await gateway.client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * 600})
        await gateway.client.delete(f"/v1/files/{first['id']}")
        await upload(gateway, "x" * 600)

    assert reply.status_code == 507
    assert reply.json()["error"]["code"] == "file_storage_full"
    assert reply.headers["x-should-retry"] == "false"


async def test_files_and_batches_count_besides_their_content(boot: Boots, tmp_path: Path) -> None:
    metadata = {f"k{number}": "v" * 512 for number in range(16)}
    bytes_max = 2 * FILE_BYTES + JOB_BYTES + 3 * 16 * 512 + 2500
    async with boot(servers(), with_batches(tmp_path, tenant_bytes=bytes_max, file_bytes=900)) as gateway:
        file = (await upload(gateway, "{"))["id"]
        batch = await ended(gateway, (await create(gateway, file, metadata=metadata))["id"])
        second = await gateway.post("/v1/batches", REQUEST | {"input_file_id": file, "metadata": metadata})
        await upload(gateway, "")
        third = await gateway.client.post("/v1/files", data={"purpose": "batch"}, files={"file": b""})
        listed = (await gateway.client.get("/v1/batches")).json()["data"]

    assert batch["status"] == "failed"
    for reply in (second, third):
        assert reply.status_code == 507
        assert reply.json()["error"]["code"] == "file_storage_full"
        assert "delete" in reply.json()["error"]["message"]
    assert [item["id"] for item in listed] == [batch["id"]]
    # What was refused has left nothing.
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [batch["id"]]


async def test_bounds_the_number_of_files_and_of_kept_batches(boot: Boots, tmp_path: Path) -> None:
    settings = {"files_per_tenant": 2, "jobs_per_tenant": 2, "kept_jobs_per_tenant": 2}
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"{"}}
    async with boot(servers(), with_batches(tmp_path, **settings) + tenants()) as gateway:
        files = [(await upload(gateway, "{"))["id"] for _ in range(2)]
        full = await gateway.client.post("/v1/files", **form)
        for file in files:
            await ended(gateway, (await create(gateway, file))["id"])
        kept = await gateway.post("/v1/batches", REQUEST | {"input_file_id": files[0]})
        await gateway.client.delete(f"/v1/files/{files[1]}")
        await upload(gateway, "{")
        use_key(gateway, "other")
        other = await run(gateway, "{")

    assert (full.status_code, kept.status_code) == (507, 507)
    assert "`batches.files_per_tenant`" in full.json()["error"]["message"]
    assert "`batches.kept_jobs_per_tenant`" in kept.json()["error"]["message"]
    assert "2592000 s after its end" in kept.json()["error"]["message"]
    assert kept.headers["x-should-retry"] == "false"
    assert other["status"] == "failed"


async def test_bounds_the_bytes_of_a_page(gateway: Running) -> None:
    metadata = {f"k{number}": "\U0001f600" * 512 for number in range(16)}
    file = (await upload(gateway, "{"))["id"]
    created = [(await create(gateway, file, metadata=metadata))["id"] for _ in range(40)]
    page = await gateway.client.get("/v1/batches?limit=100")
    listed = [item.id async for item in client_of(gateway).batches.list(limit=100)]

    shown = page.json()
    assert PAGE_BYTES / 2 < len(page.content) < PAGE_BYTES * 1.1
    assert shown["has_more"]
    assert shown["last_id"] == shown["data"][-1]["id"]
    assert listed == created[::-1]


async def test_a_file_that_is_read_cannot_be_deleted(boot: Boots, tmp_path: Path) -> None:
    server = FakeTei()
    released = hold(server)
    async with boot(only(server), with_batches(tmp_path)) as gateway:
        file = await upload(gateway, texts(3))
        batch = await create(gateway, file["id"])
        reply = await gateway.client.delete(f"/v1/files/{file['id']}")
        released.set()
        await ended(gateway, batch["id"])
        then = await gateway.client.delete(f"/v1/files/{file['id']}")

    assert reply.status_code == 400
    assert batch["id"] in reply.json()["error"]["message"]
    assert then.status_code == 200


async def test_pages_files_and_batches(gateway: Running) -> None:
    files = [(await upload(gateway, texts(1)))["id"] for _ in range(5)]
    batches = [(await create(gateway, file))["id"] for file in files]
    client = client_of(gateway)
    listed = [item.id async for item in client.batches.list(limit=2)]
    oldest = [item.id async for item in client.files.list(limit=2, order="asc", purpose="batch")]
    page = (await gateway.client.get("/v1/batches?limit=2")).json()
    bad = await gateway.client.get("/v1/batches?limit=1000")

    assert listed == batches[::-1]
    assert oldest == files
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, batches[4], batches[3])
    assert bad.status_code == 400


async def test_is_off_unless_it_is_configured(boot: Boots) -> None:
    async with boot(servers()) as gateway:
        replies = [
            await gateway.client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}),
            await gateway.client.get("/v1/files"),
            await gateway.client.get("/v1/batches"),
            await gateway.post("/v1/batches", REQUEST | {"input_file_id": "f"}),
        ]

    for reply in replies:
        assert reply.status_code == 404
        assert "`batches`" in reply.json()["error"]["message"]


def finished(gateway: Running) -> list[CallFinished]:
    return [event for event in gateway.events if isinstance(event, CallFinished)]


def answered(gateway: Running) -> list[CallFinished]:
    return [call for call in finished(gateway) if call.route.endswith("(batch)") and call.outcome == "ok"]
