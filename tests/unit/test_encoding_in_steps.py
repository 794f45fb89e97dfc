"""The event loop runs on while a large reply is encoded, in every dialect."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import numpy as np
import pytest

from backends.contract import (
    BaseWork,
    Classify,
    ClassifyReply,
    Embed,
    EmbedChunks,
    EmbedChunksReply,
    EmbedReply,
    Encode,
    EncodeReply,
    Output,
    Reply,
    RerankReply,
    TermWeights,
)
from gateway.api.dialects.registry import DIALECTS
from gateway.api.server.encoding import NUMBERS_AT_ONCE, LazyList, NumberFormat, encode_json, json_bytes
from gateway.api.server.endpoints import endpoint_of
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import options_of
from gateway.api.server.request import Request
from gateway.api.wire.replies import with_dimensions
from gateway.api.wire.vllm import encode_bytes
from gateway.config.schema import Limits
from gateway.errors import InvalidInput
from gateway.serve import Served
from tests.conftest import request_with
from tests.waiting import PATIENCE_S

UNUSED: Any = None
RNG = np.random.default_rng(0)
COUNT, WIDTH = 600, 512
ROWS = RNG.standard_normal((COUNT, WIDTH)).astype(np.float32)
# A rank has few numbers, but is an object.
RANKS = 6_000
LABELS = tuple("abcdefghijklmnopqrst")


class Turns:
    """Counts the turns that the event loop makes for others."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


def lazy_rows() -> LazyList:
    """Return the rows, made as they are encoded."""
    return LazyList(iter(ROWS), COUNT, ROWS.size)


VALUES: dict[str, Callable[[], Any]] = {
    "matrix": lambda: ROWS,
    "vector": ROWS.ravel,
    "integers": lambda: np.arange(3 * NUMBERS_AT_ONCE, dtype=np.int32),
    "objects": lambda: [{"index": i, "score": score} for i, score in enumerate(ROWS.ravel()[:RANKS])],
    "rows": lambda: {"id": "a", "data": list(ROWS), "usage": {"tokens": 1, "none": None}, "empty": []},
    "words": lambda: {"a": {f"word {i}": score for i, score in enumerate(ROWS.ravel()[:100_000].tolist())}},
    "lazy": lambda: {
        "a": LazyList(iter(ROWS), COUNT, ROWS.size),
        "b": {"c": LazyList(iter(()), 0), "d": 1.5},
    },
    "nested": lambda: LazyList(({"é": lazy_rows(), "a": ["水" * i]} for i in range(3)), 3, 3 * ROWS.size),
    "ragged": lambda: [ROWS[:1], ROWS, (), ROWS[:2], {}, "a", ROWS[:0]],
    "texts": lambda: {"texts": ['é"水' * 40_000] * 40},
}


@pytest.mark.parametrize("name", VALUES)
async def test_a_large_value_is_encoded_as_a_small_one_and_the_loop_runs(name: str) -> None:
    async with Turns() as turns:
        encoded = await encode_json(VALUES[name]())

    assert json_bytes(VALUES[name]()) == encoded
    assert turns.count > 2


async def test_a_small_value_is_encoded_at_once() -> None:
    value = {"data": LazyList(({"row": row} for row in ROWS[:2]), 2, 2 * WIDTH), "usage": [1]}
    async with Turns() as turns:
        encoded = await encode_json(value)

    read = json.loads(encoded)
    assert np.array_equal(ROWS[:2], np.array([item["row"] for item in read["data"]], np.float32))
    assert 0 == turns.count


@pytest.mark.parametrize("count", [1, COUNT])
async def test_errors_of_items_are_raised_as_they_are(count: int) -> None:
    def items() -> Any:
        yield from ROWS[: count - 1]
        raise InvalidInput("too large", param="output_dtype")

    with pytest.raises(InvalidInput, match="too large"):
        await encode_json({"items": LazyList(items(), count, count * WIDTH)})


async def test_the_loop_runs_while_bytes_are_packed() -> None:
    async with Turns() as turns:
        body, items = await encode_bytes(ROWS, NumberFormat())

    assert ROWS.tobytes() == body
    assert (COUNT, ROWS.nbytes) == (len(items), items[-1]["end"])
    assert turns.count > 2


async def test_the_loop_runs_while_multi_vectors_are_cut() -> None:
    async with Turns() as turns:
        reply = await with_dimensions(EncodeReply(1, multivector=(ROWS[:2], ROWS[2:5], ROWS[5:])), 64)

    assert [(2, 64), (3, 64), (COUNT - 5, 64)] == [rows.shape for rows in reply.multivector or ()]
    assert turns.count > 2


def reply_to(work: BaseWork) -> Reply:
    """Return a large reply."""
    count = len(work.inputs)
    if isinstance(work, Encode):
        terms = TermWeights(np.arange(WIDTH, dtype=np.int32), ROWS[0])
        some = {
            Output.DENSE: ROWS[:count],
            Output.SPARSE: (terms,) * count,
            Output.MULTIVECTOR: (ROWS[:4],) * count,
            Output.TOKENS: (ROWS[:4],) * count,
        }
        dense, sparse, multi, tokens = [some[kind] if kind in work.outputs else None for kind in some]
        return EncodeReply(count, dense, sparse, multi, tokens)  # type: ignore[arg-type]
    if isinstance(work, Classify):
        return ClassifyReply(LABELS, RNG.random((count, len(LABELS))).astype(np.float32), count)
    if isinstance(work, EmbedChunks):
        counts = tuple(map(len, work.inputs))
        return EmbedChunksReply(ROWS[: sum(counts)], counts, sum(counts))
    if isinstance(work, Embed):
        return EmbedReply(ROWS[:count], count)
    return RerankReply(RNG.random(count).astype(np.float32), count)


class Api:
    """An `InferenceApi` that knows no model, and has large replies. turns: counted from each reply on."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.gateway = SimpleNamespace(routes=SimpleNamespace(all_names=list, root_model=lambda _: "m"))
        self._api = InferenceApi(UNUSED, UNUSED, UNUSED, UNUSED, Limits(inputs=RANKS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def capabilities_of(self, *_: Any) -> None:
        """No capabilities."""

    async def serve(self, context: Any, call: Any, body: Any = None, early: Any = None) -> Served:  # noqa: ARG002
        """Return a reply at once."""
        context.inputs = call.work.counted_inputs
        self.turns.count = 0
        route: Any = SimpleNamespace(model="m")
        return Served(reply_to(call.work), UNUSED, route, ())


TEXTS = [f"text {i}" for i in range(COUNT)]
PASSAGES = [f"passage {i}" for i in range(RANKS)]
EMBEDS: dict[str, Any] = {"input": TEXTS}
POOLED = "/models/{name:str}/pipeline/"
# Path → body; of a path with a name, without its other spellings.
BODIES: dict[str, Any] = {
    "/v1/embeddings": EMBEDS,
    "/v1/multi-vector": EMBEDS,
    "/openai/v1/embeddings": EMBEDS,
    "/openai/embeddings": EMBEDS,
    "/perplexity/v1/embeddings": EMBEDS,
    "/embed": {"inputs": TEXTS},
    "/embed_all": {"inputs": TEXTS},
    "/embed_sparse": {"inputs": TEXTS},
    "/": {"inputs": TEXTS},
    "/invocations": {"inputs": TEXTS},
    "/vertex": {"instances": [{"inputs": TEXTS[:300]}, {"inputs": TEXTS[300:]}]},
    "/predict": {"inputs": [[text] for text in PASSAGES]},
    "/similarity": None,
    "/rerank": {"query": "q", "texts": PASSAGES, "return_text": True},
    "/tokenize": None,
    "/decode": None,
    f"{POOLED}feature-extraction": {"inputs": TEXTS},
    f"{POOLED}sentence-similarity": None,
    "/v1/embed": {"texts": TEXTS},
    "/v2/embed": {"texts": TEXTS, "input_type": "clustering", "embedding_types": ["int8", "base64"]},
    "/v1/rerank": {"query": "q", "documents": PASSAGES},
    "/v2/rerank": {"query": "q", "documents": PASSAGES},
    "/v1/ranking": {"query": {"text": "q"}, "passages": [{"text": text} for text in PASSAGES]},
    "/v1/retrieval/{name:str}/reranking": {
        "query": {"text": "q"},
        "passages": [{"text": text} for text in PASSAGES],
    },
    "/v1/multimodalembeddings": {"inputs": [{"content": [{"type": "text", "text": text}]} for text in TEXTS]},
    "/v1/contextualizedembeddings": {"inputs": [TEXTS[:200], TEXTS[200:]]},
    "/perplexity/v1/contextualizedembeddings": {"inputs": [TEXTS]},
    "/score": {"queries": "q", "documents": PASSAGES},
    "/classify": {"input": PASSAGES},
    "/pooling": {"input": TEXTS, "task": "token_embed"},
    "/detokenize": None,
    "/infinity/embeddings": EMBEDS,
    "/infinity/embeddings_image": None,
    "/infinity/embeddings_audio": None,
    "/infinity/rerank": {"query": "q", "documents": PASSAGES, "return_documents": True},
    "/infinity/classify": {"input": PASSAGES},
    "/v1/models/{name:str}/:batchEmbedContents": {
        "requests": [{"content": {"parts": [{"text": text}]}} for text in TEXTS]
    },
    "/v1/models/{name:str}/:embedContent": None,
    "/v1/models/{name:str}/:countTokens": None,
    "/api/embed": EMBEDS,
    "/api/show": None,
    "/api/embeddings": None,
    "/qdrant": {"inputs": [{"data": text, "data_type": "text", "model": "m"} for text in TEXTS]},
    "/vectors": {"texts": TEXTS},
    "/vectorize": {"texts": TEXTS},
    "/v1/batches": None,
    "/v1/encode/{name:str}": {
        "items": [{"id": text, "text": text} for text in TEXTS],
        "params": {"output_types": ["dense", "sparse", "multivector"]},
    },
    "/v1/score/{name:str}": {"query": {"text": "q"}, "items": [{"text": text} for text in PASSAGES]},
}
ENDPOINTS = {
    frozenset(handler.paths): endpoint
    for dialect in DIALECTS
    for handler in dialect.handlers
    if (endpoint := endpoint_of(options_of(handler).answer)) is not None
}
BY_PATH = {path: endpoint for paths, endpoint in ENDPOINTS.items() for path in paths}


def test_every_endpoint_is_among_the_bodies() -> None:
    """One without a large reply of JSON has None."""
    assert [] == [sorted(paths) for paths in ENDPOINTS if not BODIES.keys() & paths]


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body is not None])
async def test_the_loop_runs_while_a_large_reply_is_encoded(path: str) -> None:
    endpoint, context = BY_PATH[path], request_with(b"accept", "*/*")
    body: Any = BODIES[path] | ({"model": "m"} if "model" in endpoint.body.__struct_fields__ else {})
    async with asyncio.timeout(PATIENCE_S), Turns() as turns:
        data = msgspec.convert(body, endpoint.body)
        api: Any = Api(turns)
        reply = await endpoint.handler(Request(data, context, api, "m"))
        count = turns.count

    assert count > 1
    assert json.loads(bytes(reply.body))
