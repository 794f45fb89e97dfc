"""Files and batches of OpenAI's API, from the upload to the results, over the whole application."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import CONFIG, Boots, Running
from tests.fakes.tei import FakeTei, vector_of

SERVERS = {"tei-0": FakeTei, "tei-1": FakeTei, "rerank-0": FakeTei}


def with_batches(folder: Path, **settings: Any) -> str:
    return CONFIG + f"batches: {json.dumps({'dir': str(folder), **settings})}\n"


def servers() -> dict[str, FakeTei]:
    return {name: kind() for name, kind in SERVERS.items()}


def line(custom_id: str, text: str, **body: Any) -> str:
    request = {"model": "bge", "input": text, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": request})


async def upload(gateway: Running, content: bytes | str, purpose: str = "batch", **fields: str) -> Any:
    data = content.encode() if isinstance(content, str) else content
    reply = await gateway.client.post(
        "/v1/files", data={"purpose": purpose, **fields}, files={"file": ("input.jsonl", data)}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def create(gateway: Running, file: str, endpoint: str = "/v1/embeddings", **fields: Any) -> Any:
    reply = await gateway.post(
        "/v1/batches",
        {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **fields},
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def ended(gateway: Running, batch: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            shown = (await gateway.client.get(f"/v1/batches/{batch}")).json()
            if shown["status"] in {"completed", "failed", "expired", "cancelled"}:
                return shown
            await asyncio.sleep(0.02)


async def results(gateway: Running, file: str | None) -> list[Any]:
    if file is None:
        return []
    reply = await gateway.client.get(f"/v1/files/{file}/content")
    assert reply.status_code == 200
    return [json.loads(text) for text in reply.text.splitlines()]


async def test_runs_a_batch_from_upload_to_results(boot: Boots, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(300)]
    content = "\n".join(line(f"id-{number}", text) for number, text in enumerate(texts))

    async with boot(servers(), with_batches(tmp_path)) as gateway:
        file = await upload(gateway, content)
        batch = await create(gateway, file["id"], metadata={"night": "1"})
        end = await ended(gateway, batch["id"])
        lines = await results(gateway, end["output_file_id"])

    assert end["status"] == "completed"
    assert end["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert end["error_file_id"] is None
    assert end["metadata"] == {"night": "1"}
    assert [item["custom_id"] for item in lines] == [f"id-{number}" for number in range(300)]
    for text, item in zip(texts, lines, strict=True):
        assert item["response"]["status_code"] == 200
        embedding = item["response"]["body"]["data"][0]["embedding"]
        np.testing.assert_allclose(vector_of(text), embedding, rtol=1e-6)
