"""Connections that do little: ten thousand idle ones, silent ones, slow readers, and callers that break off.

    .venv/bin/python -m loadtest.connections [--only idle,silent,slow,broken]      # some three minutes

The gateway has core 0; stub, Redis and this client share core 1. Needs a limit of open files above
--connections.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import redis
import uvloop

from loadtest import corpora, schedules, servers
from loadtest.compare import machine
from loadtest.connection import Answer, Connection, connect
from loadtest.corpora import Calls
from loadtest.generator import Load, Recorder, Sample, open_loop
from loadtest.processes import group, memory, open_files, workers_of
from loadtest.servers import KEY, Server

# What the gateway promises: seconds for a first head, and without a byte taken.
HEAD_S, WRITE_S = 10.0, 30.0
AT_ONCE = 200
DIMENSIONS = 2048
BROKEN = 1000
# A body that leaves only so much of the bound passes only where hardly any other body is held.
BYTES_IN_FLIGHT, SPARED_BYTES = 1_000_000, 10_000
CALLS_A_SECOND = 50.0
SETTLE_S = 20.0


class Found(msgspec.Struct, frozen=True):
    """One figure."""

    part: str
    measure: str
    value: float | str


class Gateway:
    """A gateway with its stub and Redis, and what can be seen of it from outside."""

    def __init__(self, server: Server, stub: Server, store: str, seconds: float) -> None:
        assert server.process is not None
        self.server = server
        self.stub = stub
        self.store = store
        self.seconds = seconds
        (self.worker,) = workers_of(server.process.process.pid)
        self._seed = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server.target.port

    def calls(self, inputs: int = 1, *, floats: bool = False) -> Calls:
        """Texts that no call before had."""
        self._seed += 1
        source = corpora.texts("queries", self._seed)
        return Calls(source, inputs=inputs, form="float" if floats else "base64")

    async def beside(self, seconds: float | None = None) -> Sample:
        """How callers fare whose calls come alone."""
        moments_s = schedules.poisson(CALLS_A_SECOND, (seconds or self.seconds) + 0.5, self._seed)
        load = Load(self.server.target, self.calls(), Recorder(servers.watch(self.server)))
        return await open_loop(load, moments_s, 0.5)


async def idle(gateway: Gateway, count: int) -> list[Found]:
    """Connections that have had a call answered each, and stay open."""
    alone, before, files = await gateway.beside(), memory(gateway.worker), open_files(gateway.worker)
    kept = await _called(gateway, count)
    crowd, after = await gateway.beside(), memory(gateway.worker)
    held = open_files(gateway.worker) - files
    for one in kept:
        one.close()
    await _files_back_to(gateway, files)
    return [
        Found("idle", "connections held at once", held),
        Found("idle", "memory before, MB", before.rss_mb),
        Found("idle", "memory beside them, MB", after.rss_mb),
        Found("idle", "KB a connection", round((after.private_mb - before.private_mb) * 1000 / held, 1)),
        Found("idle", "memory after they have gone, MB", memory(gateway.worker).rss_mb),
        Found("idle", "a lone call's p50, p99 without them, ms", _quantiles(alone)),
        Found("idle", "the same beside them, ms", _quantiles(crowd)),
        Found("idle", "CPU of such a call, ms", f"{_cpu_ms(alone):.2f}, {_cpu_ms(crowd):.2f}"),
        Found("idle", "failed", alone.failed + crowd.failed),
    ]


async def _called(gateway: Gateway, count: int) -> list[Connection]:
    calls, head = gateway.calls(), gateway.server.target.head()
    gate, kept = asyncio.Semaphore(AT_ONCE), list[Connection]()

    async def one() -> None:
        async with gate, asyncio.timeout(60):
            told: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            connection = await connect("127.0.0.1", gateway.port, lambda _, a: told.set_result(a), 30)
            kept.append(connection)
            connection.send(calls.next(head).request)
            assert (await told).status == 200

    await asyncio.gather(*(one() for _ in range(count)))
    return kept


async def silent(gateway: Gateway, count: int) -> list[Found]:
    """Connections that never send anything: how long they last."""
    files = open_files(gateway.worker)
    lasted_s: list[float] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        since_s = time.monotonic()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(3 * HEAD_S):
                await reader.read()
        lasted_s.append(time.monotonic() - since_s)
        writer.close()

    calling = asyncio.create_task(gateway.beside(HEAD_S))
    await asyncio.gather(*(one() for _ in range(count)))
    beside = await calling
    await _files_back_to(gateway, files)
    return [
        Found("silent", "lasted, s: least, median, most", _spread(lasted_s)),
        Found("silent", "others' p50, p99 meanwhile, ms", _quantiles(beside)),
        Found("silent", "failed calls of others", beside.failed),
        Found("silent", "descriptors left behind", _left(gateway, files)),
    ]


async def slow(gateway: Gateway, count: int) -> list[Found]:
    """Twenty callers of 32 vectors of 2,048 numbers who read a byte a second, and then of 512 vectors.

    The kernel takes the small answers whole, so that those connections count as idle; of the large ones it
    does not, and the gateway holds the rest.
    """
    del count
    return [one for inputs in (32, 512) for one in await _slow(gateway, inputs)]


async def _slow(gateway: Gateway, inputs: int) -> list[Found]:
    part = f"slow, {inputs} vectors"
    alone, files, before = await gateway.beside(), open_files(gateway.worker), memory(gateway.worker)
    readers = [asyncio.create_task(_sip(gateway, inputs)) for _ in range(20)]
    beside = asyncio.create_task(gateway.beside(WRITE_S))
    await asyncio.sleep(WRITE_S / 3)
    held, meanwhile = memory(gateway.worker), await asyncio.to_thread(_large_call, gateway.port)
    lasted_s, others = await asyncio.gather(*readers), await beside
    await _files_back_to(gateway, files)
    afterwards = await asyncio.to_thread(_large_call, gateway.port)
    return [
        Found(part, "lasted, s: least, median, most", _spread(lasted_s)),
        Found(part, "MB they held together", round(held.rss_mb - before.rss_mb, 1)),
        Found(part, "others' p50, p99 before, ms", _quantiles(alone)),
        Found(part, "others' p50, p99 meanwhile, ms", _quantiles(others)),
        Found(part, "failed calls of others", others.failed),
        Found(
            part,
            "a call that needs the whole bound of bytes: meanwhile, after",
            f"{meanwhile}, {afterwards}",
        ),
        Found(part, "descriptors left behind", _left(gateway, files)),
    ]


async def _sip(gateway: Gateway, inputs: int) -> float:
    """Seconds from the answer's first byte until the gateway has let go of the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        # Else the kernel would take the whole answer for a client that does not.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        call = gateway.calls(inputs, floats=True).next(gateway.server.target.head())
        await loop.sock_sendall(client, call.request)
        await loop.sock_recv(client, 1)
        since_s, port = time.monotonic(), client.getsockname()[1]
        while time.monotonic() - since_s < 3 * WRITE_S and _is_held(gateway.port, port):
            await asyncio.sleep(1)
            await loop.sock_recv(client, 1)
        return time.monotonic() - since_s


def _is_held(server_port: int, client_port: int) -> bool:
    """Whether a process still has the server's end; what it left to the kernel has no inode."""
    ends = f":{server_port:04X}", f":{client_port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines():
        fields = line.split()
        if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
            return fields[9] != "0"
    return False


def _large_call(port: int) -> int:
    """The status of one whose body is nearly as large as all bodies in flight may be."""
    call = b'{"model":"stub","input":"%b"}' % (b"a " * ((BYTES_IN_FLIGHT - SPARED_BYTES) // 2))
    return servers.ask(port, "/v1/embeddings", call)[0]


async def broken(gateway: Gateway, count: int) -> list[Found]:
    """A thousand calls that are broken off: some when they are in flight, the others while they wait."""
    del count
    await gateway.beside()
    files, before = open_files(gateway.worker), memory(gateway.worker)
    servers.control(gateway.stub, reset=True, base_ms=3000.0)
    head, calls = gateway.server.target.head(), gateway.calls()
    kept = []
    for _ in range(BROKEN):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(calls.next(head).request)
        kept.append(writer)
    await _until(lambda: servers.counted(gateway.server, "gateway_lane_queued_tokens") > 0)
    await asyncio.sleep(1)
    sent = servers.stats(gateway.stub)
    gone_s = time.monotonic()
    for writer in kept:
        writer.close()
    await _until(lambda: servers.counted(gateway.server, "gateway_lane_queued_tokens") == 0)
    await _files_back_to(gateway, files)
    servers.control(gateway.stub, base_ms=0.0)
    await _until(lambda: _open_reservations(gateway.store) == 0)
    settled_s = time.monotonic() - gone_s
    # Before others call again: what they use is told within some milliseconds.
    left, opened = _left(gateway, files), _open_reservations(gateway.store)
    after = await gateway.beside()
    return [
        Found("broken", "calls broken off; of these in flight", f"{BROKEN}; {sent.inputs}"),
        Found("broken", "tokens queued after", servers.counted(gateway.server, "gateway_lane_queued_tokens")),
        Found("broken", "reservations and slots open in Redis after", opened),
        Found("broken", "all was settled after, s, at most", round(settled_s, 1)),
        Found("broken", "descriptors left behind", left),
        Found("broken", "memory before, after, MB", f"{before.rss_mb}, {memory(gateway.worker).rss_mb}"),
        Found("broken", "failed calls after them", after.failed),
        Found("broken", "p50 of calls after them, ms", after.p50_ms),
    ]


def _open_reservations(store: str) -> int:
    with redis.Redis.from_url(store) as client:
        return int(str(client.execute_command("HLEN", "gw:{one}:open")))


def _spread(values_s: list[float]) -> str:
    return f"{min(values_s):.1f}, {statistics.median(values_s):.1f}, {max(values_s):.1f}"


def _cpu_ms(sample: Sample) -> float:
    return sample.cpu["gateway"] / max(sample.per_s, 0.01) * 1000


def _quantiles(sample: Sample) -> str:
    return f"{sample.p50_ms:.2f}, {sample.p99_ms:.2f}"


def _left(gateway: Gateway, files: int) -> int:
    return max(0, open_files(gateway.worker) - files)


async def _files_back_to(gateway: Gateway, files: int) -> None:
    """Until the worker has no more of them, or patience ends."""
    await _until(lambda: open_files(gateway.worker) <= files)


async def _until(condition: Callable[[], bool]) -> None:
    """Poll another process's state: there is no event to wait for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


Part = Callable[[Gateway, int], Awaitable[list[Found]]]
PARTS: dict[str, Part] = {one.__name__: one for one in (idle, silent, slow, broken)}


async def play(name: str, count: int, seconds: float) -> list[Found]:
    """One part on fresh servers."""
    with tempfile.TemporaryDirectory() as made, group() as started:
        folder = Path(made)
        stub = servers.start_stub(folder, "--dimensions", str(DIMENSIONS))
        assert stub.process is not None
        started.append(stub.process)
        store_process, store = servers.start_redis(folder)
        started.append(store_process)
        limits = ", limits: {requests_in_flight: 20000, tokens_per_minute: 1000000000}"
        server = servers.start_gateway(
            folder,
            f"quotas: {{store: '{store}'}}\n"
            f"limits: {{in_flight_bytes: {BYTES_IN_FLIGHT}}}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
            "models: {stub: {upstream: stub}}\n"
            f"tenants: {{one: {servers.tenant(KEY, limits)}}}\n",
        )
        assert server.process is not None
        started.append(server.process)
        return await PARTS[name](Gateway(server, stub, store, seconds), count)


def main() -> None:
    """Play, tell, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5, help="of calls beside them, each time")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {servers.LOAD_CORE})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: list[Found] = []
    for name in options.only:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = runner.run(play(name, options.connections, options.seconds))
        found += told
        for one in told:
            print(f"{one.part}: {one.measure}: {one.value}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    shown = {"when": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(), "found": found}
    (options.out / "connections.json").write_bytes(msgspec.json.format(msgspec.json.encode(shown)))


if __name__ == "__main__":
    main()
