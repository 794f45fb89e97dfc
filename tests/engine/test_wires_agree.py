"""The same vectors and ranks over every wire, from one engine in float32."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from backends.contract import Vectors
from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from tests.conftest import KEY, Running, running_gateway
from tests.engine.engines import EngineInProcess, load_tiny
from tests.engine.texts import real_texts
from tests.waiting import PATIENCE_S

CONFIG = """
grpc: {listen: 127.0.0.1:0}
upstreams:
  minilm: {backend: torch, model: minilm, dtype: float32}
  cross: {backend: torch, model: cross, dtype: float32}
models: {minilm: {upstream: minilm}, cross: {upstream: cross}}
"""
ARROW = "application/vnd.apache.arrow.stream"
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
TEXTS = real_texts()[:12]
COSINE_MIN = 0.9999999


@pytest.fixture(scope="module")
def engines(minilm: Path, cross_encoder: Path) -> dict[str, EngineInProcess]:
    """Return the engines, each loaded once."""
    return {
        "minilm": EngineInProcess(load_tiny(minilm)),
        "cross": EngineInProcess(load_tiny(cross_encoder)),
    }


def arrow_stream(*batches: list[str | None]) -> bytes:
    """Return texts as an IPC stream."""
    sink = pa.BufferOutputStream()
    tables = [pa.record_batch({"text": pa.array(texts, pa.string())}) for texts in batches]
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_batch(table)
    return bytes(sink.getvalue())


class Wires:
    """Callers of one gateway, one text at a time."""

    def __init__(self, gateway: Running, channel: grpc.aio.Channel) -> None:
        self.client = gateway.client
        self.channel = channel

    async def json(self, text: str) -> Any:
        reply = await self.client.post("/embed", json={"inputs": text, "model": "minilm"})
        return reply.json()[0]

    async def base64(self, text: str) -> Any:
        body = {"input": text, "model": "minilm", "encoding_format": "base64"}
        reply = await self.client.post("/v1/embeddings", json=body)
        return np.frombuffer(base64.b64decode(reply.json()["data"][0]["embedding"]), "<f4")

    async def arrow(self, text: str) -> Any:
        reply = await self.client.post(
            "/embed?model=minilm", content=arrow_stream([text]), headers={"content-type": ARROW}
        )
        return self._row(reply)

    async def arrow_of_json(self, text: str) -> Any:
        body = {"input": text, "model": "minilm"}
        return self._row(await self.client.post("/v1/embeddings", json=body, headers={"accept": ARROW}))

    async def grpc_unary(self, text: str) -> Any:
        embed: Any = self.channel.unary_unary("/tei.v1.Embed/Embed")
        request = pb.EmbedRequest(inputs=text).SerializeToString()
        reply = await embed(request, metadata=(*AUTHORIZED, ("model", "minilm")), timeout=PATIENCE_S)
        return pb.EmbedResponse.FromString(reply).embeddings

    async def grpc_stream(self, text: str) -> Any:
        embed: Any = self.channel.stream_stream("/tei.v1.Embed/EmbedStream")
        requests = iter([pb.EmbedRequest(inputs=text).SerializeToString()])
        replies = embed(requests, metadata=(*AUTHORIZED, ("model", "minilm")), timeout=PATIENCE_S)
        (reply,) = [reply async for reply in replies]
        return pb.EmbedResponse.FromString(reply).embeddings

    async def arrow_over_grpc(self, text: str) -> Any:
        embed: Any = self.channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
        request = mux.EmbedArrowRequest(
            target=mux.Target(instance_name="minilm"), arrow_ipc=arrow_stream([text]), normalize=True
        )
        reply = await embed(request.SerializeToString(), metadata=AUTHORIZED, timeout=PATIENCE_S)
        stream = mux.EmbedArrowResponse.FromString(reply).arrow_ipc
        return pa.ipc.open_stream(stream).read_all()["embeddings"].to_pylist()[0]

    def _row(self, reply: httpx.Response) -> Any:
        assert reply.headers["content-type"] == ARROW, reply.text
        return pa.ipc.open_stream(reply.content).read_all()["embeddings"].to_pylist()[0]


@pytest.fixture
async def wires(engines: dict[str, EngineInProcess]) -> AsyncIterator[Wires]:
    """Return callers of a gateway with both listeners."""
    async with running_gateway({}, CONFIG, engines=engines) as gateway:
        assert gateway.application.create_grpc is not None
        server = gateway.application.create_grpc()
        await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Wires(gateway, channel)
        await server.stop()


async def test_vectors_are_equal_over_every_wire(wires: Wires) -> None:
    found: dict[str, Vectors] = {}
    for name in ("json", "base64", "arrow", "arrow_of_json", "grpc_unary", "grpc_stream", "arrow_over_grpc"):
        found[name] = np.array([await getattr(wires, name)(text) for text in TEXTS], np.float64)
    expected = found.pop("json")
    assert (len(TEXTS), 384) == expected.shape
    for name, vectors in found.items():
        cosines = (
            (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
        )
        assert cosines.min() >= COSINE_MIN, name


async def test_ranks_are_equal_over_every_wire(wires: Wires) -> None:
    body = {"query": TEXTS[0], "texts": TEXTS, "model": "cross"}
    ranks = (await wires.client.post("/rerank", json=body)).json()
    rerank: Any = wires.channel.unary_unary("/tei.v1.Rerank/Rerank")
    request = pb.RerankRequest(query=TEXTS[0], texts=TEXTS).SerializeToString()
    reply = await rerank(request, metadata=(*AUTHORIZED, ("model", "cross")), timeout=PATIENCE_S)
    over_grpc = pb.RerankResponse.FromString(reply).ranks
    assert [rank["index"] for rank in ranks] == [rank.index for rank in over_grpc]


async def test_an_arrow_stream_names_the_row_that_is_too_long(wires: Wires) -> None:
    content = arrow_stream(["a", None], ["b", "word " * 600])
    reply = await wires.client.post(
        "/embed?model=minilm&truncate=false", content=content, headers={"content-type": ARROW}
    )
    embed: Any = wires.channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
    request = mux.EmbedArrowRequest(target=mux.Target(instance_name="minilm"), arrow_ipc=content)
    call = embed(request.SerializeToString(), metadata=AUTHORIZED, timeout=PATIENCE_S)
    assert (422, grpc.StatusCode.INVALID_ARGUMENT) == (reply.status_code, await call.code())
    assert "row 3: " in reply.text
    assert (await call.details()).startswith("row 3: ")
