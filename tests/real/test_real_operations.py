"""Tests of real servers with classification and pairs, compared with transformers or with other routes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from backends.contract import (
    Backend,
    Capabilities,
    Classify,
    ClassifyReply,
    Operation,
    Rerank,
    RerankReply,
    Score,
)
from backends.contract.errors import UnsupportedWork
from backends.kinds import open_replica
from tests.real.classifier import LABELS, logits_by_transformers
from tests.real.record import make_models, replica_spec
from tests.real.servers import HOME, Server, serve_model
from tests.real.works import LONG, PAIRS, TEXTS, Task

# A server starts inside the first test that uses it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

# vLLM computes in bfloat16 here.
SHARE_TOLERANCE = 3e-2
SCORE_TOLERANCE = 2e-2


class Running:
    """Running server and its model."""

    def __init__(self, server: Server, url: str, model: Path) -> None:
        self.server = server
        self.url = url
        self.model = model

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
        yield Running(server, url, model)


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def classifier(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of a classifier with three labels."""
    yield from run_model(request.param, "classify")


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def reranker(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of a cross-encoder with spread scores."""
    yield from run_model(request.param, "rerank")


async def test_label_scores_equal_those_of_transformers(classifier: Running) -> None:
    logits = logits_by_transformers(classifier.model, (*TEXTS, LONG))
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    async with classifier.joined() as (backend, capabilities):
        reply = await backend.run(Classify((*TEXTS, LONG)), 60.0)

    assert isinstance(reply, ClassifyReply)
    assert {Operation.CLASSIFY, Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations
    labels = LABELS if classifier.server == "infinity" else ("LABEL_0", "LABEL_1", "LABEL_2")
    assert capabilities.labels == reply.labels == labels
    np.testing.assert_allclose(expected, reply.scores, atol=SHARE_TOLERANCE)
    assert reply.truncated in (None, (3,))


async def test_raw_label_scores_are_logits_or_refused(classifier: Running) -> None:
    async with classifier.joined() as (backend, _):
        if classifier.server == "infinity":
            with pytest.raises(UnsupportedWork):
                await backend.run(Classify(TEXTS, raw_scores=True), 60.0)
            return
        reply = await backend.run(Classify(TEXTS, raw_scores=True), 60.0)

    assert isinstance(reply, ClassifyReply)
    np.testing.assert_allclose(logits_by_transformers(classifier.model, TEXTS), reply.scores, atol=0.35)


@pytest.mark.parametrize("raw_scores", [False, True])
async def test_pair_scores_equal_those_of_reranks(reranker: Running, raw_scores: bool) -> None:
    async with reranker.joined() as (backend, _):
        paired = await backend.run(Score(PAIRS, raw_scores=raw_scores), 60.0)
        single = [await backend.run(Rerank(q, (d,), raw_scores=raw_scores), 60.0) for q, d in PAIRS]

    assert isinstance(paired, RerankReply)
    single_scores = [reply.scores[0] for reply in single if isinstance(reply, RerankReply)]
    np.testing.assert_allclose(single_scores, paired.scores, atol=SCORE_TOLERANCE, rtol=0.02)
    assert sum(reply.tokens for reply in single) == paired.tokens
