"""Tests of real servers: adapters return the built-in engine's results, or a clear refusal."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract import (
    Backend,
    Capabilities,
    Classify,
    Embed,
    EmbedReply,
    Operation,
    QueueDepth,
    ReportsQueueDepth,
    Rerank,
    Score,
)
from backends.kinds import open_replica
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.engine import Engine
from tests.engine.cross_encoder import labelled_pairs
from tests.engine.texts import real_texts
from tests.real.outcomes import outcome_of
from tests.real.record import make_models, replica_spec
from tests.real.servers import HOME, Server, serve_model
from tests.real.works import WORKS, Task

# A server starts inside the first test that uses it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

# vLLM computes in bfloat16 here.
MIN_COSINE = 0.999
SCORE_TOLERANCE = 2e-2
LOGIT_TOLERANCE = 0.35

# Works that a server refuses and the engine executes; all others must have equal results.
REFUSED = {
    ("infinity", "embed", "not_normalized"): "unsupported",
    ("infinity", "embed", "long_cut_left"): "unsupported",
    ("infinity", "rerank", "long_cut_left"): "unsupported",
    ("vllm", "embed", "long_cut_left"): "unsupported",
    ("vllm", "rerank", "long_cut_left"): "unsupported",
    # The engine and vLLM classify with a cross-encoder's only label, as TEI does.
    ("infinity", "rerank", "labels"): "unsupported",
    ("infinity", "classify", "labels_of_pairs"): "unsupported",
    ("infinity", "classify", "raw_labels"): "unsupported",
    ("vllm", "classify", "labels_of_pairs"): "unsupported",
}


class Running:
    """Running server, its model, and the built-in engine with the same model."""

    def __init__(self, server: Server, task: Task, url: str, model: Path) -> None:
        self.server = server
        self.task = task
        self.url = url
        self.model = model
        self.engine = Engine(
            load(model.resolve(), "model", LoadOptions("float32", "cpu")),
            batch_tokens=4096,
            queue_tokens=10**9,
        )

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[tuple[Backend, Capabilities]]:
        """Yield the joined backend, opened as the gateway does, and its capabilities."""
        backend = open_replica(self.server, replica_spec(self.server, self.url, self.model))
        try:
            yield backend, await backend.describe(60.0)
        finally:
            await backend.aclose()


def run_model(server: Server, task: Task) -> Iterator[Running]:
    """Run a server of one model."""
    model = make_models(HOME / "models")[task]
    with serve_model(server, model) as url:
        yield Running(server, task, url, model)


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def embedder(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of all-MiniLM-L6-v2."""
    yield from run_model(request.param, "embed")


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def reranker(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of a cross-encoder with spread scores."""
    yield from run_model(request.param, "rerank")


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def classifier(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of a classifier with three labels."""
    yield from run_model(request.param, "classify")


@pytest.mark.parametrize("name", WORKS["embed"])
async def test_embedding_server_matches_the_engine(embedder: Running, name: str) -> None:
    await _compare(embedder, name, WORKS["embed"][name])


@pytest.mark.parametrize("name", WORKS["rerank"])
async def test_cross_encoder_server_matches_the_engine(reranker: Running, name: str) -> None:
    await _compare(reranker, name, WORKS["rerank"][name])


@pytest.mark.parametrize("name", WORKS["classify"])
async def test_classifier_server_matches_the_engine(classifier: Running, name: str) -> None:
    await _compare(classifier, name, WORKS["classify"][name])


async def _compare(running: Running, name: str, work: Any) -> None:
    expected = await outcome_of(running.engine.run, work)
    refusal = REFUSED.get((running.server, running.task, name))
    async with running.joined() as (backend, _):
        outcome = await outcome_of(lambda item: backend.run(item, 120.0), work)

    if refusal is not None or "error" in expected:
        assert {"error": refusal or expected["error"]} == outcome
        return
    assert (expected["tokens"], expected.get("shape")) == (outcome["tokens"], outcome.get("shape"))
    # A server may omit the truncated inputs, but must not report wrong ones.
    assert outcome["truncated"] in (None, expected["truncated"])
    for field in ("ids", "special", "texts"):
        assert expected.get(field) == outcome.get(field)
    if "numbers" in expected:
        _compare_numbers(work, np.array(expected["numbers"]), np.array(outcome["numbers"]))


def _compare_numbers(work: Any, expected: Any, actual: Any) -> None:
    if isinstance(work, Rerank | Score | Classify):
        tolerance = LOGIT_TOLERANCE if work.raw_scores else SCORE_TOLERANCE
        np.testing.assert_allclose(expected, actual, atol=tolerance, rtol=0.02)
    else:
        np.testing.assert_allclose(expected, actual, atol=0.02, rtol=0.02)


async def test_real_texts_have_the_engines_vectors_and_usage(embedder: Running) -> None:
    texts = tuple(real_texts()[:200])
    expected = await embedder.engine.run(Embed(texts))
    async with embedder.joined() as (backend, _):
        parts = [await backend.run(Embed(texts[i : i + 25]), 120.0) for i in range(0, len(texts), 25)]

    vectors = np.concatenate([part.vectors for part in parts if isinstance(part, EmbedReply)])
    assert isinstance(expected, EmbedReply)
    cosines = (vectors * expected.vectors).sum(axis=1)
    print(f"{embedder.server}: min cosine {cosines.min():.5f}, {sum(part.tokens for part in parts)} tokens")  # noqa: T201
    assert expected.tokens == sum(part.tokens for part in parts)
    assert MIN_COSINE <= cosines.min()


async def test_orders_pairs_as_the_engine_does(reranker: Running) -> None:
    pairs = labelled_pairs()
    documents = tuple(document for (_, document), _ in pairs[:40])
    work = Rerank(pairs[0][0][0], documents, raw_scores=True)
    expected = await reranker.engine.run(work)
    async with reranker.joined() as (backend, _):
        reply = await backend.run(work, 120.0)

    assert expected.tokens == reply.tokens
    reference, scores = expected.scores, reply.scores  # type: ignore[union-attr]
    assert np.ptp(reference) > 1
    apart = np.subtract.outer(reference, reference) > 2 * LOGIT_TOLERANCE
    assert (np.subtract.outer(scores, scores)[apart] > 0).all()


async def test_describes_the_served_model(embedder: Running) -> None:
    async with embedder.joined() as (_, capabilities):
        pass

    assert {Operation.EMBED, Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations
    assert (embedder.model.name, 256, 384) == (
        capabilities.model_id,
        capabilities.max_input_tokens,
        capabilities.dimensions,
    )


async def test_reports_its_queue_depth_under_load(embedder: Running) -> None:
    async with embedder.joined() as (backend, _):
        assert isinstance(backend, ReportsQueueDepth)
        assert QueueDepth(0) == await backend.queue_depth(10.0)
        work = asyncio.create_task(backend.run(Embed(("word " * 200,) * 400), 120.0))
        depths = [await backend.queue_depth(30.0)]
        while not work.done():
            depths.append(await backend.queue_depth(30.0))
        await work

    assert max(depth.waiting_inputs for depth in depths if depth) > 0
