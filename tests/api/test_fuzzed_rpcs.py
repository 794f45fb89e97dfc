"""Damaged messages to every RPC: a clear status, never a fault of the gateway, and no memory kept.

`FUZZ_CASES=5000` sends so many; `make test` sends a few.
"""

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pyarrow as pa

from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc.messages import field, varint
from gateway.api.grpc.server import guarded_answers
from tests.api.test_arrow import TEXT_TYPES, stream, written
from tests.api.test_grpc import AUTHORIZED, Client, grpc_gateway
from tests.waiting import PATIENCE_S

CASES = int(os.environ.get("FUZZ_CASES", "400"))
Code = grpc.StatusCode
CLEAR = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
}
BGE = mux.Target(instance_name="bge")
EMBED, TEXT = pb.EmbedRequest(inputs="a b", truncate=True, dimensions=4), "a"
STREAMS = [
    stream(["a", None, "b longer than twelve bytes"], ["c"], kind=kind, codec=codec)
    for kind in TEXT_TYPES
    for codec in (None, "lz4", "zstd")
]
OTHER_TABLES = [
    written([pa.record_batch({"n": pa.array([1, 2])})]),
    written([pa.record_batch({"n": pa.array([[["a"]]])})]),
    written([pa.record_batch({"n": pa.array([{"a": "b"}])})]),
    written([pa.record_batch({"n": pa.array([b"a"])})]),
    stream(["x" * 5_000_000], codec="zstd"),
]
SEEDS: list[bytes] = [
    message.SerializeToString()
    for message in (
        EMBED,
        pb.EmbedAllRequest(inputs=TEXT),
        pb.PredictPairRequest(inputs=["a", "b"]),
        pb.RerankRequest(query="q", texts=["a", "b"], return_text=True),
        pb.RerankStreamRequest(query="q", text="a"),
        pb.EncodeRequest(inputs="a", add_special_tokens=True),
        pb.DecodeRequest(ids=[1, 2, 3]),
        mux.EmbedRequest(target=BGE, request=EMBED),
        mux.RerankRequest(
            target=mux.Target(model_id="cross"), request=pb.RerankRequest(query="q", texts=["a"])
        ),
        mux.EmbedRequest(target=mux.Target(instance_index=3), request=EMBED),
        *(mux.EmbedArrowRequest(target=BGE, arrow_ipc=body) for body in STREAMS + OTHER_TABLES),
        mux.EmbedSparseArrowRequest(target=BGE, arrow_ipc=STREAMS[0], noop=True),
    )
]


def nested(depth: int) -> bytes:
    """Return messages inside of messages, which no field of the services has."""
    content = b""
    for _ in range(depth):
        content = field(2, content)
    return content


def damaged(seed: bytes, generator: np.random.Generator) -> bytes:
    """Return a message with bytes changed, cut off, repeated, or with lengths that are not true."""
    body = bytearray(seed)
    match int(generator.integers(6)):
        case 0:
            return seed
        case 1:
            del body[int(generator.integers(len(body) + 1)) :]
        case 2:
            return (
                field(int(generator.integers(1, 16)), b"")[:1] + varint(int(generator.integers(2**40))) + seed
            )
        case 3:
            return seed * int(generator.integers(1, 4))
        case 4:
            return nested(int(generator.integers(1, 200))) + seed
    for _ in range(int(generator.integers(1, 6))):
        if body:
            body[int(generator.integers(len(body)))] = int(generator.integers(256))
    return bytes(body)


async def send(client: Client, path: str, messages: list[bytes]) -> Any:
    """Send messages of one RPC; return its status."""
    # As clients call each method: grpc's own client may lose a status that comes before its last message.
    call: Any
    if not path.endswith("Stream"):
        call = client.channel.unary_unary(path)(messages[0], metadata=AUTHORIZED, timeout=PATIENCE_S)
    elif path.endswith("RerankStream"):
        call = client.channel.stream_unary(path)(iter(messages), metadata=AUTHORIZED, timeout=PATIENCE_S)
    else:
        call = client.channel.stream_stream(path)(iter(messages), metadata=AUTHORIZED, timeout=PATIENCE_S)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    return await call.code()


async def test_damaged_messages_get_a_clear_status() -> None:
    generator, paths = np.random.default_rng(11), sorted(guarded_answers())
    found: Counter[Any] = Counter()
    async with grpc_gateway() as client:
        for number in range(CASES):
            path = paths[number % len(paths)]
            count = int(generator.integers(1, 4)) if path.endswith("Stream") else 1
            messages = [damaged(SEEDS[int(generator.integers(len(SEEDS)))], generator) for _ in range(count)]
            code = await send(client, path, messages)
            assert code in CLEAR, (code, path, messages)
            found[code] += 1
        in_flight = client.gateway.application.in_flight
        assert (0, 0) == (in_flight.bytes, in_flight.calls)
    assert found[Code.OK] > CASES // 50
    assert found[Code.INVALID_ARGUMENT] > CASES // 3


async def test_every_method_reads_its_own_messages() -> None:
    async with grpc_gateway() as client:
        for seed in SEEDS:
            assert await send(client, "/tei.v1.Embed/Embed", [seed]) in CLEAR
