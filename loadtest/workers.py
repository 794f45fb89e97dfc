"""One worker and several: what a call costs, how many pass, how callers spread, what a worker weighs.

    .venv/bin/python -m loadtest.workers

A stub TEI that answers at once, a redis-server (the one on the path) and the gateway are processes of their
own. 64 connections for each worker, opened at once, send one short text a call, each the next when it has its
answer and --pause-ms have passed. All processes share the machine's cores, so that throughput is what is left
for the gateway; CPU a call is read from /proc.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from gateway.tenants.keyring import key_digest
from loadtest.serving import INFO

STUB_PORT, GATEWAY_PORT, REDIS_PORT = 16411, 16412, 16413
URL = f"http://127.0.0.1:{GATEWAY_PORT}"
KEY = "workers-key"
CONFIG = f"""
listen: 127.0.0.1:{GATEWAY_PORT}
workers: {{workers}}
quotas: {{{{store: "{{store}}"}}}}
upstreams: {{{{stub: {{{{backend: tei, replicas: ["http://127.0.0.1:{STUB_PORT}"]}}}}}}}}
models: {{{{m: {{{{upstream: stub}}}}}}}}
tenants: {{{{acme: {{{{keys: ["{key_digest(KEY)}"], limits: {{{{requests_per_minute: 100000000}}}}}}}}}}}}
"""
BODY = json.dumps({"input": "a short text of a few words", "encoding_format": "base64"}).encode()
REQUEST = (
    f"POST /v1/embeddings HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
    f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
).encode() + BODY
WARM_UP_CALLS = 2000
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Load(msgspec.Struct, frozen=True):
    """What is sent. connections: for each worker. pause_s: of each connection before each call."""

    calls: int
    connections: int
    pause_s: float


class Found(msgspec.Struct, frozen=True):
    """One run. shares: connections of each worker; rss_mb: of each worker, after."""

    calls_per_s: float
    cpu_ms_per_1000: float
    shares: list[int]
    rss_mb: list[float]


class Stub:
    """TEI's /info and /v1/embeddings, with vectors of 384 numbers."""

    def __init__(self) -> None:
        vector = "AACAPwAAAAAAAAAA" * 128
        usage = {"prompt_tokens": 9, "total_tokens": 9}
        self._answer = json.dumps({"data": [{"index": 0, "embedding": vector}], "usage": usage}).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer every call with the same vector."""
        while (await receive()).get("more_body"):
            pass
        body = json.dumps(INFO).encode() if scope["path"] == "/info" else self._answer
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def run_stub() -> None:
    """The stub's process."""
    uvicorn.run(Stub(), port=STUB_PORT, lifespan="off", log_config=None, access_log=False, loop="uvloop")


def workers_of(parent: int) -> list[int]:
    """The gateway's HTTP workers."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(one) for one in children if b"gateway.worker" in Path(f"/proc/{one}/cmdline").read_bytes()]


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6, 1)


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    found = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(one.readlink()).startswith("socket:")
    return found


async def drive(numbers: Any, load: Load, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection's calls."""
    for _ in numbers:
        await asyncio.sleep(load.pause_s)
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the gateway answered {head.decode()}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)


async def measure(pids: list[int], load: Load) -> Found:
    """Warm up, then send so many calls."""
    before = [sockets(pid) for pid in pids]
    streams = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", GATEWAY_PORT) for _ in range(load.connections * len(pids)))
    )
    await asyncio.sleep(0.2)
    shares = [sockets(pid) - there for pid, there in zip(pids, before, strict=True)]

    async def send(count: int) -> float:
        numbers = iter(range(count))
        started_s = time.perf_counter()
        await asyncio.gather(*(drive(numbers, load, *stream) for stream in streams))
        return time.perf_counter() - started_s

    await send(WARM_UP_CALLS)
    used_s = sum(map(cpu_s, pids))
    seconds = await send(load.calls)
    used_s = sum(map(cpu_s, pids)) - used_s
    for _, writer in streams:
        writer.close()
    return Found(
        round(load.calls / seconds),
        round(used_s * 1e6 / load.calls),
        shares,
        [rss_mb(pid) for pid in pids],
    )


def run(workers: int, load: Load) -> Found:
    """A fresh gateway, measured."""
    store = f"redis://127.0.0.1:{REDIS_PORT}/0"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        config = Path(folder) / "router.yaml"
        config.write_text(CONFIG.format(workers=workers, store=store))
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert gateway.stdout is not None
        try:
            # The banner's last line says that all workers take calls.
            while b"curl" not in (line := gateway.stdout.readline()) and line:
                pass
            _check_all_called(calls=0)
            found = asyncio.run(measure(workers_of(gateway.pid), load))
            _check_all_called(calls=load.calls + WARM_UP_CALLS)
            return found
        finally:
            gateway.terminate()
            gateway.wait(30)
            gateway.stdout.close()


def _check_all_called(calls: int) -> None:
    """Whichever worker is asked tells of all."""
    text = httpx.get(f"{URL}/metrics", trust_env=False).text
    told = [line for line in text.splitlines() if line.startswith("gateway_inputs_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in told) == calls, told


def main() -> None:
    """Start stub and Redis, run with each number of workers in turn, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    load = Load(options.calls, options.connections, options.pause_ms / 1000)
    redis_server = shutil.which("redis-server")
    if redis_server is None:
        raise SystemExit("no redis-server on the path")
    with ExitStack() as running:
        stub = multiprocessing.get_context("spawn").Process(target=run_stub, daemon=True)
        stub.start()
        running.callback(stub.terminate)
        redis = subprocess.Popen(
            [redis_server, "--port", str(REDIS_PORT), "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        running.callback(redis.wait, 10)
        running.callback(redis.terminate)
        for repeat in range(options.repeats):
            for workers in options.workers:
                found = run(workers, load)
                print(
                    f"run {repeat + 1}, {workers} workers: {found.calls_per_s:.0f} calls/s, "
                    f"{found.cpu_ms_per_1000:.0f} ms of CPU in 1,000 calls, connections {found.shares}, "
                    f"RSS {found.rss_mb} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
