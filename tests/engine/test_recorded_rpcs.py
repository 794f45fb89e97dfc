"""The recorded RPCs of a real TEI 1.9.3, sent to the gateway's gRPC listener.

The embedder is the built-in engine with all-MiniLM-L6-v2 and GELU's approximation with tanh, which TEI
computes whatever the checkpoint says. The other recorded models have random heads, so fakes stand for them.
"""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2

from backends.tei_protos import tei_pb2 as pb
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from tests.conftest import KEY, running_gateway
from tests.engine.checkpoints import with_activation
from tests.engine.engines import EngineInProcess
from tests.recorded_tei import fake_of
from tests.waiting import PATIENCE_S

RECORDED: list[dict[str, Any]] = [
    json.loads(line) for line in Path("tests/golden/tei/grpc.jsonl").read_text(encoding="utf-8").splitlines()
]
CONFIG = """
grpc: {listen: 127.0.0.1:0}
upstreams:
  embedder: {backend: torch, model: minilm, dtype: float32, token_encoding: model}
  reranker: {backend: tei, replicas: ['http://reranker']}
  classifier: {backend: tei, replicas: ['http://classifier']}
  splade: {backend: tei, replicas: ['http://splade']}
models:
  embedder: {upstream: embedder}
  reranker: {upstream: reranker}
  classifier: {upstream: classifier}
  splade: {upstream: splade}
"""
# A part in a hundred thousand of the longest vector that is not normalized.
TOLERANCE = 1e-5
LONG = "word " * 600


class Sent(NamedTuple):
    """Messages of a recorded RPC, which the record does not have. model: that answered it."""

    messages: tuple[Any, ...]
    model: str = "embedder"


def _embed(text: str = "hello", **fields: Any) -> Sent:
    return Sent((pb.EmbedRequest(inputs=text, **fields),))


def _numbered(kind: Any, count: int, word: str = "text") -> tuple[Any, ...]:
    return tuple(kind(inputs=f"{word} {number}") for number in range(count))


def _rerank(texts: list[str], model: str = "reranker", **fields: Any) -> Sent:
    return Sent((pb.RerankRequest(**{"query": "q", "texts": texts} | fields),), model)


def _rerank_stream(queries: str) -> Sent:
    return Sent(
        tuple(pb.RerankStreamRequest(query=query, text=f"t{at}") for at, query in enumerate(queries)),
        "reranker",
    )


def _health(service: str) -> Sent:
    return Sent((health_pb2.HealthCheckRequest(service=service),))


SENT: dict[str, Sent] = {
    "info": Sent((pb.InfoRequest(),)),
    "info reranker": Sent((pb.InfoRequest(),), "reranker"),
    "info classifier": Sent((pb.InfoRequest(),), "classifier"),
    "plain": _embed(),
    "normalize false": _embed(normalize=False),
    "dimensions 32": _embed(dimensions=32),
    "dimensions 0": _embed(dimensions=0),
    "dimensions 9999": _embed(dimensions=9999),
    "empty": _embed(""),
    "too long": _embed(LONG),
    "too long truncate": _embed(LONG, truncate=True),
    "too long truncate left": _embed(LONG, truncate=True, truncation_direction="TRUNCATION_DIRECTION_LEFT"),
    "prompt unknown": _embed(prompt_name="q"),
    "all": Sent((pb.EmbedAllRequest(inputs="a b"),)),
    "sparse on dense": Sent((pb.EmbedSparseRequest(inputs="a"),)),
    "sparse": Sent((pb.EmbedSparseRequest(inputs="a"),), "splade"),
    "dense on splade": Sent((pb.EmbedRequest(inputs="a"),), "splade"),
    "embed on reranker": Sent((pb.EmbedRequest(inputs="a"),), "reranker"),
    "predict": Sent((pb.PredictRequest(inputs="a"),), "classifier"),
    "predict raw": Sent((pb.PredictRequest(inputs="a", raw_scores=True),), "classifier"),
    "pair": Sent((pb.PredictPairRequest(inputs=["a", "b"]),), "classifier"),
    "pair of one": Sent((pb.PredictPairRequest(inputs=["a"]),), "classifier"),
    "pair of three": Sent((pb.PredictPairRequest(inputs=["a", "b", "c"]),), "classifier"),
    "predict on embedder": Sent((pb.PredictRequest(inputs="a"),)),
    "predict on reranker": Sent((pb.PredictRequest(inputs="a"),), "reranker"),
    "rerank": _rerank(["a", "b", "c"]),
    "rerank text raw": _rerank(["a", "b"], raw_scores=True, return_text=True),
    "rerank none": _rerank([]),
    "rerank empty query": _rerank(["a"], query=""),
    "rerank 33": _rerank(["a"] * 33),
    "rerank on embedder": _rerank(["a"], "embedder"),
    "tokenize": Sent((pb.EncodeRequest(inputs="hello world"),)),
    "tokenize special": Sent((pb.EncodeRequest(inputs="hello", add_special_tokens=True),)),
    "tokenize empty": Sent((pb.EncodeRequest(),)),
    "decode": Sent((pb.DecodeRequest(ids=[101, 7592, 102]),)),
    "decode skip": Sent((pb.DecodeRequest(ids=[101, 7592, 102], skip_special_tokens=True),)),
    "decode none": Sent((pb.DecodeRequest(),)),
    "decode out of range": Sent((pb.DecodeRequest(ids=[999999]),)),
    "5": Sent(_numbered(pb.EmbedRequest, 5)),
    "third too long": Sent(
        (
            *_numbered(pb.EmbedRequest, 2),
            pb.EmbedRequest(inputs=LONG),
            *_numbered(pb.EmbedRequest, 2),
        )
    ),
    "none": Sent(()),
    "2000": Sent(tuple(pb.EmbedRequest(inputs=f"text {number % 10}") for number in range(2000))),
    "sparse 3": Sent(_numbered(pb.EmbedSparseRequest, 3), "splade"),
    "predict 3": Sent(_numbered(pb.PredictRequest, 3), "classifier"),
    "pair, second bad": Sent(
        tuple(pb.PredictPairRequest(inputs=texts) for texts in (["a", "b"], ["a"], ["c", "d"])), "classifier"
    ),
    "tokenize 3": Sent(_numbered(pb.EncodeRequest, 3, "t")),
    "decode 2": Sent((pb.DecodeRequest(ids=[7592]), pb.DecodeRequest())),
    "rerank 4": _rerank_stream("qqqq"),
    "rerank mixed query": _rerank_stream("qqrr"),
    "rerank none stream": _rerank_stream(""),
    "rerank 40": _rerank_stream("q" * 40),
    "": _health(""),
    "tei.v1.Embed": _health("tei.v1.Embed"),
    "tei.v1.Info": _health("tei.v1.Info"),
    "nothing": _health("nothing"),
}


# Differences that are kept, in the order of the table in docs/grpc.md. The value is the gateway's status.
KEPT = {
    "rerank 33": "OK",
    "rerank on embedder": "OK",
    "decode out of range": "INVALID_ARGUMENT",
    "rerank 4": "OK",
    "rerank 40": "OK",
    "rerank mixed query": "INVALID_ARGUMENT",
    "rerank none stream": "INVALID_ARGUMENT",
}
# Facts that TEI and the gateway both know.
FACTS_OF_INFO = ("model_type", "model_dtype", "max_input_length", "max_concurrent_requests")
REPLIES = {
    "Info": pb.InfoResponse,
    "Embed": pb.EmbedResponse,
    "EmbedAll": pb.EmbedAllResponse,
    "EmbedSparse": pb.EmbedSparseResponse,
    "Predict": pb.PredictResponse,
    "PredictPair": pb.PredictResponse,
    "Rerank": pb.RerankResponse,
    "Tokenize": pb.EncodeResponse,
    "Decode": pb.DecodeResponse,
    "Check": health_pb2.HealthCheckResponse,
}


def name_of(recorded: dict[str, Any]) -> str:
    """Return the name of a recorded RPC: the key of `SENT`. Two have the same case."""
    is_stream = recorded["call"] == "Rerank/RerankStream"
    return "rerank none stream" if is_stream and recorded["case"] == "rerank none" else recorded["case"]


@pytest.fixture(scope="module")
def engine(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineInProcess:
    """Return an engine with the checkpoint's weights and the approximation."""
    folder = with_activation(minilm, tmp_path_factory.mktemp("tanh") / "minilm", "gelu_pytorch_tanh")
    return EngineInProcess(load(folder, "embedder", LoadOptions("float32", "cpu")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(engine: EngineInProcess) -> AsyncIterator[grpc.aio.Channel]:
    """Return a connection to a gateway with the four recorded models."""
    fakes = {name: fake_of(name) for name in ("reranker", "classifier", "splade")}
    async with running_gateway(fakes, CONFIG, engines={"embedder": engine}) as gateway:
        assert gateway.application.create_grpc is not None
        server = gateway.application.create_grpc()
        await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as connection:
            yield connection
        await server.stop()


def test_each_recorded_rpc_has_its_messages() -> None:
    names = [name_of(recorded) for recorded in RECORDED]
    assert len(names) == len(set(names))
    assert set(names) == set(SENT)
    assert KEPT.keys() < SENT.keys()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
async def test_an_rpc_is_answered_as_tei_does(channel: grpc.aio.Channel, recorded: dict[str, Any]) -> None:
    path, sent = recorded["call"], SENT[name_of(recorded)]
    call = channel.stream_stream(f"/{path}" if path.startswith("grpc.") else f"/tei.v1.{path}")(
        (message.SerializeToString() for message in sent.messages),
        metadata=(("authorization", f"Bearer {KEY}"), ("model", sent.model)),
        timeout=PATIENCE_S,
    )
    replies = []
    with suppress(grpc.aio.AioRpcError):
        replies += [reply async for reply in call]
    status = (await call.code()).name

    assert status == KEPT.get(name_of(recorded), recorded["status"]), await call.details()
    if status != "OK" or recorded["status"] != "OK":
        assert status == "OK" or await call.details()
        return
    assert recorded.get("metadata", {}).keys() <= dict(await call.initial_metadata()).keys()
    assert recorded.get("received", 1) == len(replies)
    kind = REPLIES[path.rsplit("/", 1)[1].removesuffix("Stream")]
    for reply, expected in zip(replies, recorded.get("replies") or [recorded.get("reply")], strict=False):
        if expected is not None and not str(expected).startswith("…"):
            assert_reply(kind.FromString(reply), expected, is_fake=sent.model != "embedder")


def assert_reply(reply: Any, expected: Any, *, is_fake: bool) -> None:
    """Compare a reply. is_fake: its scores and weights are not TEI's, whose order and names hold."""
    if isinstance(reply, health_pb2.HealthCheckResponse):
        assert expected == reply.status
        return
    found = MessageToDict(reply, preserving_proto_field_name=True)
    if isinstance(reply, pb.InfoResponse):
        names = [name for name in FACTS_OF_INFO if name in expected]
        names = [name for name in names if not is_fake or name != "model_dtype"]
        assert {name: expected[name] for name in names} == {name: found[name] for name in names}
        return
    sizes = ("compute_chars",) if is_fake else ("compute_chars", "compute_tokens")
    for name in sizes:
        assert expected.get("metadata", {}).get(name) == found.get("metadata", {}).get(name)
    expected, found = ({k: v for k, v in item.items() if k != "metadata"} for item in (expected, found))
    assert expected.keys() == found.keys()
    for name in expected:
        assert_items(expected[name], found[name], is_fake=is_fake)


def assert_items(expected: Any, found: Any, *, is_fake: bool) -> None:
    """Compare a field whose recorded list may end with the whole list's length."""
    if not isinstance(expected, list):
        assert expected == found
        return
    if isinstance(expected[-1], str) and expected[-1].startswith("…"):
        assert is_fake or int(expected[-1].removeprefix("… ")) == len(found)
        expected = expected[:-1]
    if isinstance(expected[0], float):
        np.testing.assert_allclose(expected, found[: len(expected)], atol=TOLERANCE)
    elif "embeddings" in expected[0]:
        assert len(expected) == len(found)
        for item, other in zip(expected, found, strict=True):
            assert_items(item["embeddings"], other["embeddings"], is_fake=is_fake)
    elif is_fake:
        # A field that is 0 is left out: the index of the first item.
        assert {frozenset(item) - {"index"} for item in expected} == {
            frozenset(item) - {"index"} for item in found
        }
        assert {item.get("label") for item in expected} == {item.get("label") for item in found}
    else:
        assert expected == found
