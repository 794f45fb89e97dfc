"""One worker and several: what a call costs, how many pass, how callers spread, what a worker weighs.

    .venv/bin/python -m loadtest.workers

A stub TEI that answers at once, a redis-server (the one on the path) and the gateway are processes of their
own. 64 connections for each worker, opened at once, send one short text a call, each the next when it has its
answer and --pause-ms have passed; each text is another. All processes share the machine's cores, so that
throughput is what is left for the gateway; CPU a call is read from /proc.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import httpx
import msgspec

from gateway.tenants.keyring import key_digest
from loadtest import corpora, servers
from loadtest.corpora import Calls
from loadtest.processes import free_port, group, memory, usage, workers_of
from loadtest.serving import stub

KEY = "workers-key"
CONFIG = """
listen: 127.0.0.1:{port}
workers: {workers}
quotas: {{store: "{store}"}}
upstreams: {{stub: {{backend: tei, replicas: ["{stub}"]}}}}
models: {{m: {{upstream: stub}}}}
tenants: {{acme: {{keys: ["{digest}"], limits: {{requests_per_minute: 100000000}}}}}}
"""
WARM_UP_CALLS = 2000


class Load(msgspec.Struct, frozen=True):
    """What is sent. connections: for each worker. pause_s: of each connection before each call."""

    calls: int
    connections: int
    pause_s: float


class Places(msgspec.Struct, frozen=True):
    """Where everything listens: the gateway's port, the URLs of Redis and of the stub."""

    port: int
    store: str
    stub: str


class Found(msgspec.Struct, frozen=True):
    """One run. shares: connections of each worker; rss_mb: of each worker, after."""

    calls_per_s: float
    cpu_ms_per_1000: float
    shares: list[int]
    rss_mb: list[float]


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    found = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(one.readlink()).startswith("socket:")
    return found


async def drive(
    requests: Iterator[bytes], load: Load, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection's calls."""
    for request in requests:
        await asyncio.sleep(load.pause_s)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the gateway answered {head.decode()}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)


async def measure(port: int, pids: list[int], load: Load) -> Found:
    """Warm up, then send so many calls."""
    before = [sockets(pid) for pid in pids]
    streams = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port) for _ in range(load.connections * len(pids)))
    )
    await asyncio.sleep(0.2)
    shares = [sockets(pid) - there for pid, there in zip(pids, before, strict=True)]

    calls, head = Calls(corpora.texts("queries", port), model="m"), servers.bearer(port, KEY).head()
    requests = (calls.next(head).request for _ in count())

    async def send(number: int) -> float:
        some = islice(requests, number)
        started_s = time.perf_counter()
        await asyncio.gather(*(drive(some, load, *stream) for stream in streams))
        return time.perf_counter() - started_s

    await send(WARM_UP_CALLS)
    used_s = usage(pids).cpu_s
    seconds = await send(load.calls)
    used_s = usage(pids).cpu_s - used_s
    for _, writer in streams:
        writer.close()
    return Found(
        round(load.calls / seconds),
        round(used_s * 1e6 / load.calls),
        shares,
        [memory(pid).rss_mb for pid in pids],
    )


def run(workers: int, places: Places, load: Load) -> Found:
    """A fresh gateway, measured."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        config = Path(folder) / "router.yaml"
        shown = msgspec.structs.asdict(places)
        config.write_text(CONFIG.format(workers=workers, digest=key_digest(KEY), **shown))
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(config)]
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert gateway.stdout is not None
        try:
            # The banner's last line says that all workers take calls.
            while b"curl" not in (line := gateway.stdout.readline()) and line:
                pass
            _check_all_called(places.port, calls=0)
            found = asyncio.run(measure(places.port, workers_of(gateway.pid), load))
            _check_all_called(places.port, calls=load.calls + WARM_UP_CALLS)
            return found
        finally:
            gateway.terminate()
            gateway.wait(30)
            gateway.stdout.close()


def _check_all_called(port: int, calls: int) -> None:
    """Whichever worker is asked tells of all."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
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
    with (
        tempfile.TemporaryDirectory() as name,
        stub(Path(name), "--dimensions", "384") as url,
        group() as started,
    ):
        redis, store = servers.start_redis(Path(name))
        started.append(redis)
        redis.spread()
        places = Places(free_port(), store, url)
        for repeat in range(options.repeats):
            for workers in options.workers:
                found = run(workers, places, load)
                print(
                    f"run {repeat + 1}, {workers} workers: {found.calls_per_s:.0f} calls/s, "
                    f"{found.cpu_ms_per_1000:.0f} ms of CPU in 1,000 calls, connections {found.shares}, "
                    f"RSS {found.rss_mb} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
