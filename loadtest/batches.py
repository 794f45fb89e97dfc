"""A job under kill -9 of gateways, a restart of Redis and a full disk; and interactive calls next to a job.

    .venv/bin/python -m loadtest.batches --lines 100000 --kill-every-s 10      # about ten minutes

Every custom_id must be in the results once, with its own vector, and recorded usage must be that of the
results and of the lines that were in flight when a gateway was killed.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import openai

from loadtest import corpora, servers
from loadtest.processes import PinnedProcess, free_port, memory, process_group, workers_of
from loadtest.servers import KEY, RunningServer
from loadtest.stub_protocol import mark_of
from loadtest.testbed import Testbed

TIMEOUT_S = 1200.0
POLL_S = 0.5
FULL_S = 10.0
LINES_IN_FLIGHT = 32
RATE = 60.0
PERSISTENT = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


class Line(msgspec.Struct):
    """A line of the results, as far as it is checked."""

    custom_id: str
    response: dict[str, object] | None


class Checked(msgspec.Struct):
    """Contents of the results of a job. wrong: vectors that are not those of their text."""

    lines: int = 0
    ids: int = 0
    wrong: int = 0
    in_order: bool = True
    tokens: int = 0


class Trouble:
    """Kills gateways in turn, restarts Redis and fills the disk, until it is stopped."""

    def __init__(self, bed: "Bed", every_s: float) -> None:
        self.kills = self.redis_restarts = self.full_disks = 0
        self._bed = bed
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, once everything that was killed runs again."""
        self._stop.set()
        self._thread.join(120)

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(self._every_s):
                return
            self._bed.kill_gateway(number % len(self._bed.gateways))
            self.kills += 1
            if number == 1:
                self._bed.restart_redis()
                self.redis_restarts += 1
            if number == 2 and self._bed.fill_disk(self._stop):
                self.full_disks += 1


class Bed:
    """Stub, Redis with its data on disk, and gateways that share a folder of bounded size."""

    def __init__(self, folder: Path, processes: list[PinnedProcess], count: int) -> None:
        self._folder = folder
        self._processes = processes
        self.disk = folder / "disk"
        self.stub = servers.start_stub(folder, "--base-ms", "2", "--parallel", "16")
        processes.append(self.stub.process)
        self._port = free_port()
        self._redis, self.url = self._start_redis()
        self.gateways: list[RunningServer] = []
        for number in range(count):
            self.gateways.append(self._start(number))
        self.memory_mb: list[float] = []

    def _start_redis(self) -> tuple[PinnedProcess, str]:
        """Start Redis on the file that it writes every command to."""
        redis = servers.start_redis(self._folder, self._port, PERSISTENT)
        self._processes.append(redis[0])
        return redis

    def _start(self, number: int) -> RunningServer:
        config = (
            f"quotas: {{store: '{self.url}', timeout_ms: 500}}\n"
            f"batches: {{dir: '{self.disk}', lines_in_flight: {LINES_IN_FLIGHT}}}\n"
            "logs: {access: false}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{self.stub.target.port}']}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{main: {servers.tenant(KEY, ', limits: {tokens_per_day: 1000000000}')}}}\n"
        )
        gateway = servers.start_gateway(self._folder, config, name=f"gateway-{number}", cores="0,1")
        self._processes.append(gateway.process)
        return gateway

    def kill_gateway(self, number: int) -> None:
        """Send SIGKILL to all processes of a gateway, and start another in its place."""
        old = self.gateways[number]
        with contextlib.suppress(OSError, KeyError):
            self.memory_mb += [memory(worker).rss_mb for worker in workers_of(old.process.process.pid)]
        old.process.kill()
        self.gateways[number] = self._start(number)

    def restart_redis(self) -> None:
        """Kill Redis, and start it on the file that it has written."""
        self._redis.kill()
        self._redis, _ = self._start_redis()

    def fill_disk(self, stop: threading.Event) -> bool:
        """Fill the folder's file system for some seconds; return False if it has no bound."""
        if not self.disk.is_mount():
            return False
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024 * 1024))
        stop.wait(FULL_S)
        filler.unlink()
        return True


@contextlib.contextmanager
def bounded_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a file system of this size, where that is allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    # Found by their names: distributions differ in the folder.
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=False)  # noqa: S607


def input_lines(count: int) -> Iterator[bytes]:
    """Yield the lines of an input. The text of each is that of its custom_id."""
    texts = corpora.texts("queries", 4711)
    for number in range(count):
        body = {"model": "stub", "input": next(texts), "encoding_format": "base64"}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}
        yield msgspec.json.encode(line) + b"\n"


def check_results(content: Iterator[str], count: int) -> Checked:
    """Compare the results of a job with its input."""
    texts = corpora.texts("queries", 4711)
    found, ids = Checked(), set()
    decode = msgspec.json.Decoder(Line).decode
    for number, text in enumerate(content):
        line = decode(text)
        ids.add(line.custom_id)
        found.lines += 1
        found.in_order = found.in_order and line.custom_id == f"line-{number}"
        body = msgspec.convert((line.response or {}).get("body"), dict[str, object])
        data = msgspec.convert(body["data"], list[dict[str, object]])
        vector = np.frombuffer(base64.b64decode(str(data[0]["embedding"])), "<f4")
        mark = np.array(mark_of(next(texts)), np.float32)
        found.wrong += not np.allclose(vector[: len(mark)], mark, atol=1e-6)
        found.tokens += msgspec.convert(body["usage"], dict[str, int])["total_tokens"]
    found.ids = len(ids)
    found.wrong += count - found.lines
    return found


def run_kills(folder: Path, lines: int, every_s: float, count: int) -> bool:
    """Run a job under trouble, print the figures, and return whether everything was exact."""
    # Results are read by their journals and chunks, and the input: three times the results at most.
    megabytes = max(128, lines * 20 // 1000)
    with bounded_disk(folder / "disk", megabytes), process_group() as processes:
        bed = Bed(folder, processes, count)
        path = folder / "input.jsonl"
        with path.open("wb") as file:
            file.writelines(input_lines(lines))
        with Trouble(bed, every_s) as trouble:
            started_s = time.monotonic()
            batch = _submit(bed, path)
            end = _wait(bed, batch)
            seconds = time.monotonic() - started_s
        client = _client(bed)
        with client.files.with_streaming_response.content(end.output_file_id or "") as reply:
            checked = check_results(reply.iter_lines(), lines)
        usage = msgspec.json.decode(servers.request(bed.gateways[0].target.port, "/usage")[1])
        tokens = sum(row["tokens"] for row in usage["data"])
        computed = servers.stats(bed.stub)
    counts = end.request_counts
    print(f"{end.status} in {seconds:.0f} s, {lines / seconds:.0f} lines/s, {counts}")
    print(
        f"kills {trouble.kills}, Redis restarts {trouble.redis_restarts}, full disks {trouble.full_disks}; "
        f"memory of killed workers {min(bed.memory_mb, default=0):.0f} to "
        f"{max(bed.memory_mb, default=0):.0f} MB"
    )
    print(f"results: {checked}")
    print(
        f"tokens: results {checked.tokens}, usage {tokens} ({tokens - checked.tokens:+}), "
        f"computed by the upstream {computed.tokens} ({computed.inputs - lines:+} inputs)"
    )
    return end.status == "completed" and (checked.lines, checked.ids, checked.wrong, checked.in_order) == (
        lines,
        lines,
        0,
        True,
    )


def _client(bed: Bed) -> openai.OpenAI:
    port = bed.gateways[0].target.port
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=10)


def _submit(bed: Bed, path: Path) -> str:
    """Upload the input and create the job; both are repeated if their gateway is killed meanwhile."""
    while True:
        try:
            client = _client(bed)
            file = client.files.create(file=path, purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
            )
        except openai.APIError:
            time.sleep(POLL_S)
        else:
            return batch.id


def _wait(bed: Bed, batch: str) -> "openai.types.Batch":
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(openai.APIError):
            found = _client(bed).batches.retrieve(batch)
            if found.status in {"completed", "failed", "expired", "cancelled"}:
                return found
        time.sleep(POLL_S)
    raise TimeoutError(f"the job has not ended within {TIMEOUT_S:.0f} s")


async def run_next_to(folder: Path, seconds: float, lines: int) -> None:
    """Print the latency of interactive calls alone and next to a job, in turns, and memory during the job."""
    with process_group() as processes:
        bed = Testbed(folder, processes, seconds)
        stub = bed.stub("--base-ms", "5", "--parallel", "8")
        settings = f"batches: {{dir: '{folder / 'next'}'}}\nstate_dir: '{folder}'\nlogs: {{access: false}}\n"
        gateway = bed.gateway(stub, settings=settings)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.target.port}/v1", api_key=KEY)
        path = folder / "next.jsonl"
        with path.open("wb") as file:
            file.writelines(input_lines(lines))
        worker = workers_of(gateway.process.process.pid)[0]
        ratios = []
        for repeat in range(3):
            alone = await bed.open(gateway, RATE)
            before_mb = memory(worker).rss_mb
            batch = await asyncio.to_thread(_begin, client, path)
            first = client.batches.retrieve(batch).request_counts
            with_job = await bed.open(gateway, RATE)
            last = client.batches.retrieve(batch).request_counts
            client.batches.cancel(batch)
            await asyncio.to_thread(_wait_while, client, batch, "cancelling")
            p95 = alone.p95_ms, with_job.p95_ms
            ratios.append(p95[1] / p95[0])
            done = (last.completed if last else 0) - (first.completed if first else 0)
            print(
                f"{repeat}: p95 {p95[0]:.1f} ms alone, {p95[1]:.1f} ms next to a job of {done / seconds:.0f} "
                f"lines/s: {ratios[-1]:.2f} times; memory {before_mb:.0f} to {memory(worker).rss_mb:.0f} MB"
            )
        print(f"median ratio {sorted(ratios)[1]:.2f}")


def _begin(client: openai.OpenAI, path: Path) -> str:
    """Create a job and return its id when its lines run."""
    file = client.files.create(file=path, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    _wait_while(client, batch.id, "validating")
    return batch.id


def _wait_while(client: openai.OpenAI, batch: str, status: str) -> None:
    while client.batches.retrieve(batch).status == status:
        time.sleep(0.1)


def main() -> None:
    """Run, print the figures, and exit with 1 if a result was not exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kill-every-s", type=float, default=10.0)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load next to a job")
    parser.add_argument("--only", choices=["kills", "next"])
    arguments = parser.parse_args()
    is_exact = True
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "next":
            is_exact = run_kills(Path(folder), arguments.lines, arguments.kill_every_s, arguments.gateways)
        if arguments.only != "kills":
            asyncio.run(run_next_to(Path(folder), arguments.seconds, arguments.lines // 2))
    raise SystemExit(not is_exact)


if __name__ == "__main__":
    main()
