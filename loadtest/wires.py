"""Cost of the same vectors over every wire: JSON, base64, Arrow, gRPC streams, and Arrow over gRPC.

    .venv/bin/python -m loadtest.wires --texts 10000 --dimensions 1024 4096 --repeats 3      # five minutes

One gateway on core 0 in front of the stub, on core 1 with the load. Each repeat runs all wires, in
alternating order; figures are the gateway's processor time per 1,000 vectors and vectors per second.
"""

import argparse
import asyncio
import base64
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from rich.console import Console
from rich.table import Table

from backends.tei_protos import tei_multiplexer_pb2, tei_pb2
from loadtest import servers
from loadtest.processes import free_port, process_group
from loadtest.results import spread
from loadtest.servers import KEY, RunningServer

OK = 200
CALL_TEXTS = 1000
ARROW = "application/vnd.apache.arrow.stream"
METADATA = (("authorization", f"Bearer {KEY}"),)
OPTIONS = (("grpc.max_receive_message_length", -1),)

# Sends texts; returns the number of vectors and the sum of their first numbers.
Wire = Callable[[Sequence[str]], Awaitable[tuple[int, float]]]


class Figure(NamedTuple):
    """One run of one wire."""

    cpu_ms: float
    rate: float


class Callers:
    """Callers of one gateway. Each returns the count of the vectors and the sum of their first numbers."""

    def __init__(self, url: str, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self._url = url
        self._session = session
        self._channel = channel

    def wires(self) -> dict[str, Wire]:
        """Return all wires by name."""
        return {
            "JSON": self.json,
            "base64": self.base64,
            "Arrow": self.arrow,
            "gRPC EmbedStream": self.stream,
            "gRPC EmbedArrow": self.embed_arrow,
        }

    async def _post(self, path: str, body: bytes, **headers: str) -> bytes:
        async with self._session.post(self._url + path, data=body, headers=headers) as reply:
            content = await reply.read()
            if reply.status != OK:
                raise RuntimeError(f"{path}: {reply.status} {content[:200]!r}")
            return content

    async def json(self, texts: Sequence[str]) -> tuple[int, float]:
        """Ask for numbers in JSON."""
        body = msgspec.json.encode({"model": "stub", "input": texts})
        reply = await self._post("/v1/embeddings", body, **{"content-type": "application/json"})
        rows = [item["embedding"] for item in msgspec.json.decode(reply)["data"]]
        return len(rows), sum(row[0] for row in rows)

    async def base64(self, texts: Sequence[str]) -> tuple[int, float]:
        """Ask for packed numbers in JSON."""
        body = msgspec.json.encode({"model": "stub", "input": texts, "encoding_format": "base64"})
        reply = await self._post("/v1/embeddings", body, **{"content-type": "application/json"})
        rows = [
            np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
            for item in msgspec.json.decode(reply)["data"]
        ]
        return len(rows), float(sum(row[0] for row in rows))

    async def arrow(self, texts: Sequence[str]) -> tuple[int, float]:
        """Send and receive Arrow over HTTP."""
        reply = await self._post("/embed", arrow_stream(texts), **{"content-type": ARROW})
        return sum_of(reply)

    async def stream(self, texts: Sequence[str]) -> tuple[int, float]:
        """Send a message for each text."""
        embed: Any = self._channel.stream_stream("/tei.v1.Embed/EmbedStream")

        async def messages() -> AsyncIterator[bytes]:
            for text in texts:
                yield tei_pb2.EmbedRequest(inputs=text).SerializeToString()

        rows = [
            tei_pb2.EmbedResponse.FromString(reply).embeddings[0]
            async for reply in embed(messages(), metadata=METADATA)
        ]
        return len(rows), sum(rows)

    async def embed_arrow(self, texts: Sequence[str]) -> tuple[int, float]:
        """Send and receive Arrow over gRPC."""
        embed: Any = self._channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
        target = tei_multiplexer_pb2.Target(instance_name="stub")
        request = tei_multiplexer_pb2.EmbedArrowRequest(
            target=target, arrow_ipc=arrow_stream(texts), normalize=True
        )
        reply = await embed(request.SerializeToString(), metadata=METADATA)
        return sum_of(tei_multiplexer_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc)


def arrow_stream(texts: Sequence[str]) -> bytes:
    """Return texts as an IPC stream."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": list(texts)})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def sum_of(stream: bytes) -> tuple[int, float]:
    """Return the count of the vectors in an IPC stream, and the sum of their first numbers."""
    table = pa.ipc.open_stream(stream).read_all()
    rows = table["embeddings"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    return len(rows), float(rows[:, 0].sum())


async def measure(gateway: RunningServer, wire: Wire, texts: Sequence[str]) -> tuple[Figure, float]:
    """Run one wire; return its figure, and the sum over all vectors."""
    cpu_s, started_s = gateway.process.usage().cpu_s, time.perf_counter()
    count, total = 0, 0.0
    for start in range(0, len(texts), CALL_TEXTS):
        found, part = await wire(texts[start : start + CALL_TEXTS])
        count, total = count + found, total + part
    if count != len(texts):
        raise RuntimeError(f"{len(texts)} texts got {count} vectors")
    seconds = time.perf_counter() - started_s
    cpu_s = gateway.process.usage().cpu_s - cpu_s
    return Figure(cpu_s * 1e6 / count, count / seconds), total


async def run(folder: Path, dimensions: int, texts: int, repeats: int) -> dict[str, list[Figure]]:
    """Return the figures of every wire for vectors of one width."""
    with process_group() as processes:
        stub = servers.start_stub(folder, "--dimensions", str(dimensions))
        processes.append(stub.process)
        grpc_port = free_port()
        config = (
            f"grpc: {{listen: 127.0.0.1:{grpc_port}}}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
            f"models: {{stub: {{upstream: stub}}}}\ntenants: {{main: {servers.tenant(KEY)}}}\n"
        )
        gateway = servers.start_gateway(folder, config)
        processes.append(gateway.process)
        url, address = f"http://127.0.0.1:{gateway.target.port}", f"127.0.0.1:{grpc_port}"
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
            grpc.aio.insecure_channel(address, OPTIONS) as channel,
        ):
            wires = Callers(url, session, channel).wires()
            figures: dict[str, list[Figure]] = {name: [] for name in wires}
            for repeat in range(repeats + 1):
                corpus = [f"text {repeat} {number}" for number in range(texts)]
                names = list(wires) if repeat % 2 else list(reversed(wires))
                totals: list[float] = []
                for name in names:
                    figure, total = await measure(gateway, wires[name], corpus)
                    totals.append(total)
                    # The first repeat warms up: pyarrow is imported by the first call that needs it.
                    if repeat:
                        figures[name].append(figure)
                if not np.allclose(totals, totals[0], rtol=1e-5):
                    raise RuntimeError(f"the wires gave different vectors: {totals}")
    return figures


def main() -> None:
    """Print a table for each width."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for dimensions in arguments.dimensions:
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(run(Path(folder), dimensions, arguments.texts, arguments.repeats))
        table = Table(
            "wire", "gateway CPU, ms per 1,000 vectors", "vectors/s", title=f"{dimensions} dimensions"
        )
        for name, runs in figures.items():
            table.add_row(
                name, str(spread(run.cpu_ms for run in runs)), str(spread(run.rate for run in runs))
            )
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
