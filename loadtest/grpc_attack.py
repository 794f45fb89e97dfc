"""Attacks on the gRPC listener by callers without a key: the worker's memory and CPU, a victim's calls.

    .venv/bin/python -m loadtest.grpc_attack --seconds 8                       # three minutes
    .venv/bin/python -m loadtest.grpc_attack --tree ../before --only references health
    .venv/bin/python -m loadtest.grpc_attack --calls                           # honest calls, no attack

One gateway with the stub behind it, freshly started for each attack. The victim sends one short text after
the other on one connection of its own. Attackers write frames to sockets, in a process of their own, and
connect again when the gateway ends their connection.
"""

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from rich.console import Console
from rich.table import Table

from backends.tei_protos import tei_pb2
from gateway.api.grpc import frames
from gateway.api.grpc.frames import encode_frame
from gateway.api.grpc.hpack import encode_block
from loadtest import servers
from loadtest.processes import free_port, memory, process_group, usage, workers_of
from loadtest.servers import KEY, RunningServer

EMBED, HEALTH = "/tei.v1.Embed/Embed", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
METADATA = (("authorization", f"Bearer {KEY}"),)
UNBOUNDED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
OPENING = frames.PREFACE + frames.settings_frame({})
LARGE_BYTES = 31 * 1024 * 1024
CALLS = 1000
TURN_S = 0.02

# Runs until the time is up; called with the port, the end and the counter of calls.
Attacker = Callable[[int, float, "Synchronized[int]"], None]
# Yields what one connection sends, with the calls in it.
Script = Callable[[], Iterator[tuple[bytes, int]]]


def head(path: str, **metadata: str) -> bytes:
    """Return the header block of an RPC."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    fields |= {"content-type": "application/grpc", "te": "trailers"} | metadata
    return encode_block([(name.encode(), value.encode()) for name, value in fields.items()])


def references() -> Iterator[tuple[bytes, int]]:
    """Yield blocks of HEADERS and 8 CONTINUATION frames that refer to one entry of the table."""
    entry = b"\x40\x01a\x46" + b"b" * 70
    pieces = [b"\xbe" * frames.FRAME_BYTES_MAX] * 7 + [b"\xbe" * 9_000]
    for number in count(1, 2):
        block = encode_frame(frames.HEADERS, frames.END_STREAM, number, head(EMBED) + entry)
        for at, piece in enumerate(pieces):
            flags = frames.END_HEADERS if at == len(pieces) - 1 else 0
            block += encode_frame(frames.CONTINUATION, flags, number, piece)
        yield block, 1


def plain_metadata() -> Iterator[tuple[bytes, int]]:
    """Yield calls with 216 KB of plain metadata."""
    block = head(EMBED, **{f"k{number}": "v" * 4000 for number in range(54)})
    for number in count(1, 2):
        yield frames.headers_frames(number, block, ends=True), 1


def coded_metadata() -> Iterator[tuple[bytes, int]]:
    """Yield calls with metadata in Huffman's code that fits the bound of 32 KiB."""
    value = b"\x1f\x8b" * 4_000
    coded = b"\0\x01a\xff" + _rest(len(value)) + value
    for number in count(1, 2):
        yield frames.headers_frames(number, head(EMBED) + coded, ends=True), 1


def _rest(size: int) -> bytes:
    size -= 0x7F
    return bytes((size & 0x7F | 0x80, size >> 7)) if size < 2**14 else b""


def continuations() -> Iterator[tuple[bytes, int]]:
    """Yield one header block without an end."""
    yield encode_frame(frames.HEADERS, 0, 1, head(EMBED)), 1
    while True:
        yield encode_frame(frames.CONTINUATION, 0, 1, b"\0\x01a\x7f\x80\x7f" + b"x" * 16_255) * 4, 0


def wrong_keys() -> Iterator[tuple[bytes, int]]:
    """Yield calls with a wrong key and a message."""
    block = head(EMBED, authorization="Bearer sk-wrong")
    message = struct.pack(">BI", 0, 5) + b"\x0a\x03a b"
    for number in count(1, 2):
        data = encode_frame(frames.DATA, frames.END_STREAM, number, message)
        yield frames.headers_frames(number, block, ends=False) + data, 1


def resets() -> Iterator[tuple[bytes, int]]:
    """Yield calls that are reset at once."""
    block = head(EMBED)
    for number in count(1, 32):
        calls = [
            frames.headers_frames(at, block, ends=False) + frames.reset_frame(at, frames.CANCEL)
            for at in range(number, number + 32, 2)
        ]
        yield b"".join(calls), 16


def pings() -> Iterator[tuple[bytes, int]]:
    """Yield pings and settings."""
    while True:
        yield (encode_frame(frames.PING, 0, 0, b"12345678") + frames.settings_frame({4: 1})) * 500, 0


def stalls() -> Iterator[tuple[bytes, int]]:
    """Yield questions whose answers the client does not take."""
    yield frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}), 0
    question = struct.pack(">BI", 0, 2) + b"\x3a\x00"
    for number in range(1, 200, 2):
        yield (
            frames.headers_frames(number, head(REFLECTION), ends=False)
            + encode_frame(frames.DATA, 0, number, question),
            1,
        )
    while True:
        yield b"", 0


def slow_heads() -> Iterator[tuple[bytes, int]]:
    """Yield a header block without an end, a byte at a time."""
    yield encode_frame(frames.HEADERS, 0, 1, head(EMBED) + b"\0\x01a\x7f\x80\x78" + b"x" * 14_000), 1
    while True:
        yield encode_frame(frames.CONTINUATION, 0, 1, b"x"), 0


def flood(script: Script, connections: int = 1, bytes_per_s: float | None = None) -> Attacker:
    """Return an attacker on some connections. bytes_per_s: of all of them, None for as many as they take."""

    def attack(port: int, end_s: float, calls: "Synchronized[int]") -> None:
        rate = None if bytes_per_s is None else bytes_per_s / connections
        _together([lambda: _send(script, port, end_s, calls, rate)] * connections)

    return attack


def _send(
    script: Script, port: int, end_s: float, calls: "Synchronized[int]", bytes_per_s: float | None
) -> None:
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(OPENING)
            connection.settimeout(1)
            reading = threading.Thread(target=_drain, args=(connection,))
            reading.start()
            try:
                for content, begun in script():
                    if time.monotonic() > end_s:
                        break
                    connection.sendall(content)
                    with calls.get_lock():
                        calls.value += begun
                    time.sleep(len(content) / bytes_per_s if bytes_per_s else 0 if content else TURN_S)
            finally:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                reading.join()


def _drain(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            with contextlib.suppress(TimeoutError):
                if not connection.recv(65536):
                    return


def large_messages(path: str) -> Attacker:
    """Return an attacker with 4 channels that send 4 messages of 31 MB each."""

    def attack(port: int, end_s: float, calls: "Synchronized[int]") -> None:
        message = b"\x0a\x80\x80\xc0\x0f" + b"x" * LARGE_BYTES

        def send(number: int) -> None:
            options = (*UNBOUNDED, ("grpc.primary_user_agent", f"c{number % 4}"))
            with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                while time.monotonic() < end_s:
                    method: Any = channel.stream_stream(path)
                    rpc = method(iter((message,)), timeout=30)
                    with contextlib.suppress(grpc.RpcError):
                        list(rpc)
                    with calls.get_lock():
                        calls.value += 1

        _together([partial(send, number) for number in range(16)])

    return attack


ATTACKS: dict[str, Attacker] = {
    "references": flood(references, bytes_per_s=2e6),
    "metadata": flood(plain_metadata, 2),
    "coded": flood(coded_metadata, 2),
    "continuations": flood(continuations, bytes_per_s=1e8),
    "reflection": large_messages(REFLECTION),
    "health": large_messages(HEALTH),
    "keys": flood(wrong_keys, 4),
    "resets": flood(resets, 4),
    "pings": flood(pings, 4),
    "stalls": flood(stalls, 50),
    "heads": flood(slow_heads, 200),
}


class Result(NamedTuple):
    """Figures of one attack. Memory in MB, times in ms."""

    name: str
    before_mb: float
    peak_mb: float
    after_mb: float
    alone: list[float]
    under: list[float]
    failed: int
    calls: int
    cpu_s: float


class Victim:
    """Caller with a key, on one connection. failed: number of its calls."""

    def __init__(self, port: int) -> None:
        self.failed = 0
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", UNBOUNDED)
        self._embed: Any = self._channel.unary_unary(EMBED)

    def call(self, text: str) -> float:
        """Send a text; return the milliseconds."""
        start_s = time.perf_counter()
        content = tei_pb2.EmbedRequest(inputs=text).SerializeToString()
        try:
            self._embed(content, metadata=METADATA, timeout=60)
        except grpc.RpcError:
            self.failed += 1
        return (time.perf_counter() - start_s) * 1e3

    def calls(self, seconds: float) -> list[float]:
        """Call for a time; return the milliseconds of each call."""
        end_s = time.monotonic() + seconds
        found: list[float] = []
        while time.monotonic() < end_s:
            found.append(self.call(f"text {len(found)}"))
            time.sleep(0.01)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def start(folder: Path, tree: Path, processes: list[Any]) -> tuple[RunningServer, int]:
    """Start a gateway in front of a stub; return it and its port for gRPC."""
    stub = servers.start_stub(folder)
    port = free_port()
    config = (
        f"grpc: {{listen: 127.0.0.1:{port}}}\n"
        f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
        "models: {stub: {upstream: stub}}\n"
        f"tenants: {{main: {servers.tenant(KEY)}}}\n"
    )
    gateway = servers.start_gateway(folder, config, tree=tree)
    processes += [stub.process, gateway.process]
    return gateway, port


def attacked(name: str, tree: Path, seconds: float) -> Result:
    """Run one attack on a fresh gateway."""
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        gateway, port = start(Path(folder), tree, processes)
        (worker,) = workers_of(gateway.process.process.pid)
        victim = Victim(port)
        victim.calls(1)
        alone = victim.calls(3)
        before, cpu_s = memory(worker).rss_mb, usage([worker]).cpu_s
        calls = multiprocessing.Value("i", 0)
        end_s = time.monotonic() + seconds
        attacker = multiprocessing.Process(target=ATTACKS[name], args=(port, end_s, calls), daemon=True)
        attacker.start()
        under = victim.calls(seconds)
        attacker.join(30)
        if attacker.is_alive():
            attacker.kill()
        used_s = usage([worker]).cpu_s - cpu_s
        failed = victim.failed
        victim.calls(2)
        victim.close()
        found = memory(worker)
        return Result(name, before, found.peak_mb, found.rss_mb, alone, under, failed, calls.value, used_s)


def refused_ms(tree: Path) -> dict[str, float]:
    """Return the worker's CPU per refused call, mean of 1,000, for each kind of call without a valid key."""
    found = {}
    for name, script in {
        "wrong key": wrong_keys,
        "coded metadata": coded_metadata,
        "plain metadata": plain_metadata,
        "references": references,
    }.items():
        with tempfile.TemporaryDirectory() as folder, process_group() as processes:
            gateway, port = start(Path(folder), tree, processes)
            (worker,) = workers_of(gateway.process.process.pid)
            sent = 0
            before_s = usage([worker]).cpu_s
            while sent < CALLS:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as peer:
                    peer.sendall(OPENING)
                    for content, calls in script():
                        if sent >= CALLS:
                            break
                        sent += calls
                        peer.sendall(content)
                        peer.settimeout(0.001)
                        with contextlib.suppress(TimeoutError):
                            while peer.recv(65536):
                                pass
                            break
            time.sleep(1)
            found[name] = (usage([worker]).cpu_s - before_s) / CALLS * 1e3
    return found


def honest(tree: Path, seconds: float) -> dict[str, float]:
    """Return figures of calls with a key."""
    with tempfile.TemporaryDirectory() as folder, process_group() as processes:
        gateway, port = start(Path(folder), tree, processes)
        (worker,) = workers_of(gateway.process.process.pid)
        victim = Victim(port)
        victim.calls(1)

        def cpu_of(work: Callable[[], None]) -> float:
            before_s = usage([worker]).cpu_s
            work()
            return usage([worker]).cpu_s - before_s

        lone: list[float] = []
        cpu_s = cpu_of(lambda: lone.extend(_in_turn(victim, seconds)))
        figures = {
            "lone call, p50 ms": statistics.median(lone),
            "lone call, CPU ms": cpu_s / len(lone) * 1e3,
        }
        together: list[float] = []
        cpu_s = cpu_of(lambda: _together([lambda: together.extend(_in_turn(victim, seconds))] * 16))
        figures["16 callers, calls/s"] = len(together) / seconds
        figures["16 callers, CPU ms"] = cpu_s / len(together) * 1e3
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", UNBOUNDED)
        start_s = time.perf_counter()
        figures["stream of 10,000 texts, CPU s"] = cpu_of(lambda: _stream(channel))
        figures["stream of 10,000 texts, s"] = time.perf_counter() - start_s
        watched: list[float] = []
        watch = threading.Thread(target=lambda: watched.extend(victim.calls(4)))
        watch.start()
        start_s = time.perf_counter()
        figures["message of 31 MB, CPU s"] = cpu_of(lambda: _large(channel))
        figures["message of 31 MB, s"] = time.perf_counter() - start_s
        watch.join()
        figures["message of 31 MB, another caller's worst ms"] = max(watched)
        return figures


def _in_turn(victim: Victim, seconds: float) -> list[float]:
    end_s, found = time.monotonic() + seconds, list[float]()
    while time.monotonic() < end_s:
        found.append(victim.call(f"text {len(found)} {end_s}"))
    return found


def _together(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stream(channel: grpc.Channel) -> None:
    stream: Any = channel.stream_stream("/tei.v1.Embed/EmbedStream", response_deserializer=len)
    requests = [tei_pb2.EmbedRequest(inputs=f"s {at}").SerializeToString() for at in range(10_000)]
    list(stream(iter(requests), metadata=METADATA, timeout=120))


def _large(channel: grpc.Channel) -> None:
    large = tei_pb2.EmbedRequest(inputs="word " * (LARGE_BYTES // 5)).SerializeToString()
    method: Any = channel.unary_unary(EMBED)
    with contextlib.suppress(grpc.RpcError):
        method(large, metadata=METADATA, timeout=60)


def main() -> None:
    """Run the attacks and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=servers.ROOT)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", nargs="*", choices=ATTACKS)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--refused", action="store_true")
    arguments = parser.parse_args()
    console, tree = Console(width=150), arguments.tree.resolve()
    if arguments.calls or arguments.refused:
        figures = honest(tree, arguments.seconds) if arguments.calls else refused_ms(tree)
        for name, figure in figures.items():
            console.print(f"{name}: {figure:.2f}")
        return
    table = Table(title=str(tree))
    for column in (
        "attack",
        "MB before",
        "peak",
        "after",
        "p50 alone",
        "worst",
        "p50 under",
        "worst",
        "failed",
        "calls",
    ):
        table.add_column(column, justify="right")
    table.add_column("CPU s")
    for name in arguments.only or ATTACKS:
        found = attacked(name, tree, arguments.seconds)
        figures_ms = (
            statistics.median(found.alone),
            max(found.alone),
            statistics.median(found.under),
            max(found.under),
        )
        memory_mb = (found.before_mb, found.peak_mb, found.after_mb)
        cells = [f"{figure:,.0f}" for figure in (*memory_mb, *figures_ms, found.failed, found.calls)]
        table.add_row(name, *cells, f"{found.cpu_s:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
