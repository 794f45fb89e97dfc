"""A victim with one call at a time beside a flood: what the neighbour costs, and whether bulk still moves.

    .venv/bin/python -m loadtest.neighbours

A stub TEI serves eight requests in parallel at a fixed time each; the gateway (a process of its own) has a
window of eight in front of it. The victim calls alone first, then beside 200 callers of another tenant.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.tenants.keyring import key_digest

STUB_PORT, GATEWAY_PORT = 16401, 16402
SERVICE_S, PARALLEL = 0.05, 8
VICTIM, FLOOD = "victim-key", "flood-key"
CONFIG = f"""
listen: 127.0.0.1:{GATEWAY_PORT}
upstreams:
  stub: {{backend: tei, replicas: ["http://127.0.0.1:{STUB_PORT}"], in_flight_batches: {PARALLEL}}}
models: {{m: {{upstream: stub}}}}
tenants:
  victim: {{keys: ["{key_digest(VICTIM)}"]}}
  flood: {{keys: ["{key_digest(FLOOD)}"]}}
"""
INFO = {
    "model_id": "stub",
    "model_type": {"embedding": {"pooling": "cls"}},
    "max_input_length": 512,
    "max_client_batch_size": 32,
    "max_concurrent_requests": 512,
    "auto_truncate": True,
    "version": "1.9.3",
}


class Stub:
    """TEI's /info and /v1/embeddings, eight at a time."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PARALLEL)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer every call with the same vectors."""
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer: Any = INFO
        if scope["path"] != "/info":
            async with self._slots:
                await asyncio.sleep(SERVICE_S)
            count = len(json.loads(body)["input"])
            data = [{"index": n, "embedding": "AACAPwAAAAA="} for n in range(count)]
            answer = {"data": data, "usage": {"prompt_tokens": 3 * count}}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def run_stub() -> None:
    """The stub's process."""

    async def serve() -> None:
        config = uvicorn.Config(Stub(), port=STUB_PORT, lifespan="off", log_config=None, access_log=False)
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


async def call(client: httpx.AsyncClient, key: str, text: str, **headers: str) -> float:
    """One call's time in seconds."""
    started_s = time.perf_counter()
    reply = await client.post(
        "/v1/embeddings", json={"input": text}, headers={"authorization": f"Bearer {key}", **headers}
    )
    reply.raise_for_status()
    return time.perf_counter() - started_s


async def victim(client: httpx.AsyncClient, calls: int) -> list[float]:
    """One at a time, a moment's thought between."""
    times = []
    for number in range(calls):
        times.append(await call(client, VICTIM, f"victim {number}"))
        await asyncio.sleep(0.01)
    return times


async def measure(calls: int, flood: int) -> dict[str, Any]:
    """Alone, then beside interactive and bulk callers of another tenant."""
    limits = httpx.Limits(max_connections=flood + 10)
    url = f"http://127.0.0.1:{GATEWAY_PORT}"
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
        alone = await victim(client, calls)
        done = {"interactive": 0, "bulk": 0}
        stop = asyncio.Event()

        async def caller(number: int) -> None:
            kind = "bulk" if number % 2 else "interactive"
            while not stop.is_set():
                await call(client, FLOOD, f"flood {number} {done[kind]}", **{"x-priority": kind})
                done[kind] += 1

        callers = [asyncio.create_task(caller(number)) for number in range(flood)]
        await asyncio.sleep(1)
        started_s, before = time.perf_counter(), dict(done)
        beside = await victim(client, calls)
        seconds = time.perf_counter() - started_s
        rates = {kind: round((done[kind] - before[kind]) / seconds, 1) for kind in done}
        stop.set()
        await asyncio.gather(*callers)
    return {"alone": alone, "beside": beside, "flood_calls_per_s": rates}


def p95(times: list[float]) -> float:
    """In milliseconds."""
    return round(statistics.quantiles(times, n=20)[-1] * 1000, 1)


def main() -> None:
    """Start stub and gateway, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    stub = multiprocessing.get_context("spawn").Process(target=run_stub, daemon=True)
    stub.start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "router.yaml"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
        gateway = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
        )
        try:
            _wait_ready()
            for repeat in range(options.repeats):
                found = asyncio.run(measure(options.calls, options.flood))
                alone, beside = p95(found["alone"]), p95(found["beside"])
                print(
                    f"run {repeat + 1}: victim's p95 {alone} ms alone, {beside} ms beside "
                    f"{options.flood} callers: {beside / alone:.2f} times; "
                    f"flood {found['flood_calls_per_s']} calls/s"
                )
        finally:
            gateway.terminate()
            gateway.wait(30)
            stub.terminate()


def _wait_ready() -> None:
    for _ in range(200):
        try:
            if httpx.get(f"http://127.0.0.1:{GATEWAY_PORT}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the gateway did not start")


if __name__ == "__main__":
    main()
