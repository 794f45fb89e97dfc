"""Files and batches of a gateway under test: its configuration, and its API as a caller uses it."""

import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Running
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

OVERLOADED = 503, b'{"error": "overloaded", "error_type": "Overloaded"}'
ENDED = {"completed", "failed", "expired", "cancelled"}
# Without the identity of the input.
REQUEST = {"endpoint": "/v1/embeddings", "completion_window": "24h"}


def with_batches(folder: Path, **settings: Any) -> str:
    """Return a configuration with batches, whose models are `bge` and `cross`."""
    return CONFIG + f"batches: {json.dumps({'dir': str(folder), **settings})}\n"


def tenants(**limits: Any) -> str:
    """Return tenants of two keys, of which the usual one has limits."""
    own = {"keys": [key_digest(KEY)], "limits": limits}
    return f"tenants: {json.dumps({'acme': own, 'other': {'keys': [key_digest('other')]}})}\n"


def use_key(gateway: Running, key: str) -> None:
    """Let the client send another key."""
    gateway.client.headers["authorization"] = f"Bearer {key}"


def servers(**changed: FakeTei) -> dict[str, FakeTei]:
    """Return the servers of all replicas. changed: by name, with `_` for `-`."""
    found = {name: FakeTei() for name in ("tei-0", "tei-1", "rerank-0")}
    return found | {name.replace("_", "-"): server for name, server in changed.items()}


def only(server: FakeTei) -> dict[str, FakeTei]:
    """Return the servers of all replicas, of which one embeds."""
    return {"tei-0": server, "rerank-0": FakeTei()}


def hold(*held: FakeTei) -> asyncio.Event:
    """Let servers answer only once the event is set."""
    released = asyncio.Event()

    async def wait(*_: Any) -> None:
        await released.wait()

    for server in held:
        server.hook = wait
    return released


def line(custom_id: str, text: str, **body: Any) -> str:
    """Return a line that embeds a text."""
    request = {"model": "bge", "input": text, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": request})


def texts(count: int) -> str:
    """Return an input of so many lines."""
    return "\n".join(line(f"id-{number}", f"text {number}") for number in range(count))


async def upload(gateway: Running, content: bytes | str, purpose: str = "batch") -> Any:
    """Return a file that was uploaded."""
    data = content.encode() if isinstance(content, str) else content
    files = {"file": ("input.jsonl", data)}
    reply = await gateway.client.post("/v1/files", data={"purpose": purpose}, files=files)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def create(gateway: Running, file: str, **fields: Any) -> Any:
    """Return a batch of an uploaded file."""
    reply = await gateway.post("/v1/batches", REQUEST | {"input_file_id": file} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def submit(gateway: Running, content: bytes | str, **fields: Any) -> str:
    """Upload an input and return the id of its batch."""
    id_: str = (await create(gateway, (await upload(gateway, content))["id"], **fields))["id"]
    return id_


async def shown_of(gateway: Running, batch: str) -> Any:
    """Return the state of a batch."""
    return (await gateway.client.get(f"/v1/batches/{batch}")).json()


async def cancel(gateway: Running, batch: str) -> Any:
    """Return the reply to a cancellation."""
    return await gateway.post(f"/v1/batches/{batch}/cancel", {})


async def ended(gateway: Running, batch: str) -> Any:
    """Return the state of a batch at its end."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            shown = await shown_of(gateway, batch)
            if shown["status"] in ENDED:
                return shown
            await asyncio.sleep(0.02)


async def run(gateway: Running, content: bytes | str, **fields: Any) -> Any:
    """Return the end of a batch that runs an input."""
    return await ended(gateway, await submit(gateway, content, **fields))


async def results(gateway: Running, file: str | None) -> list[Any]:
    """Return the lines of a file of results, none if there is no file."""
    if file is None:
        return []
    reply = await gateway.client.get(f"/v1/files/{file}/content")
    assert reply.status_code == 200
    return [json.loads(text) for text in reply.text.splitlines()]


async def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition, or what it returns to be awaited, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)
