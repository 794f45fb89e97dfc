"""Batches under kill -9 of gateways, a Redis that loses its data, and a disk that is full."""

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from gateway.tenants.keyring import key_digest
from loadtest.batches import bounded_disk
from loadtest.processes import family
from tests.batches import ENDED, line
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, TLS_CONTEXT, Served
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
state_dir: {folder}/state-{number}
quotas: {{store: "{store}", timeout_ms: 2000}}
batches: {{dir: {folder}/disk, lines_in_flight: 8}}
upstreams: {{one: {{backend: tei, replicas: ["{upstream}"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{digest}"], limits: {{tokens_per_day: 1000000}}}}}}
"""
LINES = 700
# A killed gateway's chunks are taken over after the lease of 15 s.
TIMEOUT_S = 100.0


class Gateways:
    """Gateways of one Redis and one folder, in front of an upstream that takes its time."""

    def __init__(self, folder: Path, store: str, upstream: str, count: int) -> None:
        self._folder = folder
        self._settings = {"store": store, "upstream": upstream, "digest": key_digest(KEY)}
        self._clients: dict[str, openai.OpenAI] = {}
        self.running = [self.start(number) for number in range(count)]

    def start(self, number: int) -> Served:
        """Start a gateway."""
        path = self._folder / f"router-{number}.yaml"
        path.write_text(CONFIG.format(folder=self._folder, number=number, **self._settings))
        return Served(path).wait_until_up()

    def kill(self, number: int) -> None:
        """Kill all processes of a gateway at once, and start another in its place."""
        for pid in family(self.running[number].process.pid):
            os.kill(pid, signal.SIGKILL)
        self.running[number].stop()
        self.running[number] = self.start(number)

    def client(self, number: int = 0) -> openai.OpenAI:
        """Return the real client of a gateway."""
        url = f"{self.running[number].url}/v1"
        if url not in self._clients:
            http = httpx.Client(trust_env=False, verify=TLS_CONTEXT)
            self._clients[url] = openai.OpenAI(base_url=url, api_key=KEY, max_retries=5, http_client=http)
        return self._clients[url]

    def submit(self) -> str:
        """Upload an input and create its batch."""
        lines = [line(f"id-{n}", f"text {n}", encoding_format="base64") for n in range(LINES)]
        client = self.client()
        content = "\n".join(lines).encode()
        file = client.files.create(file=("input.jsonl", content), purpose="batch")
        return client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        ).id

    def wait(self, batch: str, done: int | None = None) -> Any:
        """Return a batch once it has ended, or has results of so many lines."""
        end_s = time.monotonic() + TIMEOUT_S
        found = None
        while time.monotonic() < end_s:
            try:
                found = self.client(-1).batches.retrieve(batch)
            except openai.APIError:
                found = None
            if found is not None and found.status in ENDED:
                return found
            counts = None if found is None else found.request_counts
            if done is not None and counts is not None and counts.completed >= done:
                return found
            time.sleep(0.04)
        raise AssertionError(f"the batch has not ended: {found}")

    def check(self, batch: str) -> None:
        """Check that every line has its own result once, in the order of the input."""
        end = self.wait(batch)
        assert end.status == "completed"
        assert end.request_counts.model_dump() == {"completed": LINES, "failed": 0, "total": LINES}
        output = self.client(-1).files.content(end.output_file_id).text.splitlines()
        results = [json.loads(text) for text in output]
        assert [result["custom_id"] for result in results] == [f"id-{number}" for number in range(LINES)]
        for number, result in enumerate(results):
            embedding = base64.b64decode(result["response"]["body"]["data"][0]["embedding"])
            np.testing.assert_allclose(
                vector_of(f"text {number}"), np.frombuffer(embedding, "<f4"), rtol=1e-6
            )

    def stop(self) -> None:
        """Stop all gateways, and close the clients."""
        for client in self._clients.values():
            client.close()
        for gateway in self.running:
            gateway.stop()


@pytest.fixture
def upstream() -> Iterator[tuple[FakeTei, str]]:
    """Serve an upstream whose replies take a while, so that lines are in flight at a kill."""
    server = FakeTei()

    async def take_time(*_: Any) -> None:
        await asyncio.sleep(0.02)

    server.hook = take_time
    with serve_in_thread(server) as url:
        yield server, url


def test_every_line_has_one_result_under_kills(
    own_redis: RedisServer, upstream: tuple[FakeTei, str], tmp_path: Path
) -> None:
    server, url = upstream
    with ExitStack() as stack:
        gateways = Gateways(tmp_path, own_redis.url, url, 2)
        stack.callback(gateways.stop)
        batch = gateways.submit()
        gateways.wait(batch, done=1)
        gateways.kill(0)
        gateways.kill(1)
        gateways.check(batch)
        with gateways.running[0].client() as client:
            usage = client.get("/usage").json()["data"]

    computed = sum(len(body["input"]) for _, body in server.requests)
    counted = sum(row["inputs"] for row in usage)
    # What was computed twice was in flight at a kill; every result was paid.
    assert LINES <= counted <= computed <= LINES + 2 * 2 * 8


def test_goes_on_when_redis_has_lost_its_data(
    own_redis: RedisServer, upstream: tuple[FakeTei, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        gateways = Gateways(tmp_path, own_redis.url, upstream[1], 1)
        stack.callback(gateways.stop)
        done = gateways.submit()
        gateways.check(done)
        batch = gateways.submit()
        gateways.wait(batch, done=1)
        own_redis.kill()
        own_redis.restart()
        gateways.check(batch)
        gateways.check(done)
        listed = [item.id for item in gateways.client().batches.list()]

    assert listed == [batch, done]


def test_a_full_disk_makes_a_batch_wait(
    own_redis: RedisServer, upstream: tuple[FakeTei, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stack.enter_context(bounded_disk(tmp_path / "disk", 8))
        if not (tmp_path / "disk").is_mount():
            pytest.skip("this system mounts no bounded disk for a test")
        gateways = Gateways(tmp_path, own_redis.url, upstream[1], 1)
        stack.callback(gateways.stop)
        batch = gateways.submit()
        gateways.wait(batch, done=1)
        filler = tmp_path / "disk" / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65536))
        with pytest.raises(openai.InternalServerError, match="disk for files is full"):
            gateways.client().with_options(max_retries=0).files.create(
                file=("more.jsonl", b"x" * 100_000), purpose="batch"
            )
        waits = "waits: results cannot be stored: No space left on device"
        end_s = time.monotonic() + PATIENCE_S
        while not any(waits in text for text in gateways.running[0].log) and time.monotonic() < end_s:
            time.sleep(0.04)
        filler.unlink()
        gateways.check(batch)

        assert any(waits in text for text in gateways.running[0].log)


def test_gateways_of_one_redis_must_share_the_folder(
    own_redis: RedisServer, upstream: tuple[FakeTei, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            gateways = Gateways(tmp_path / name, own_redis.url, upstream[1], 1)
            stack.callback(gateways.stop)
        with pytest.raises(openai.InternalServerError, match=r"another `batches\.dir`"):
            gateways.client().with_options(max_retries=0).files.list()
