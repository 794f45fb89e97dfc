"""Tests with one cross-encoder on three backends: every dialect orders the same documents alike."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract import Vectors
from tests.engine.cross_encoder import labelled_pairs
from tests.processes.conftest import Served
from tests.real.record import make_models
from tests.real.servers import HOME, serve_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# Scores closer than this may change order, because vLLM computes in bfloat16.
APART = 2e-2
BACKENDS = ("torch", "infinity", "vllm")
CONFIG = """
listen: 127.0.0.1:0
upstreams:
  torch: {{backend: torch, model: {model}, dtype: float32}}
  infinity: {{backend: infinity, replicas: ["{infinity}"], tokenizer: {model}}}
  vllm: {{backend: vllm, replicas: ["{vllm}"]}}
models:
  torch: {{upstream: torch}}
  infinity: {{upstream: infinity}}
  vllm: {{upstream: vllm}}
"""

RerankCall = Callable[[httpx.Client, str, str, list[str]], Any]


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _cohere(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": documents}
    return [(rank["index"], rank["relevance_score"]) for rank in _post(client, "/v2/rerank", body)["results"]]


def _jina(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": [{"text": document} for document in documents]}
    return [(rank["index"], rank["relevance_score"]) for rank in _post(client, "/v1/rerank", body)["results"]]


def _tei(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"query": query, "texts": documents}
    return [(rank["index"], rank["score"]) for rank in _post(client, f"/models/{model}/rerank", body)]


def _vllm(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "queries": query, "documents": documents}
    return [(rank["index"], rank["score"]) for rank in _post(client, "/v1/score", body)["data"]]


def _infinity(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": documents}
    ranks = _post(client, "/infinity/rerank", body)["results"]
    return [(rank["index"], rank["relevance_score"]) for rank in ranks]


DIALECTS: dict[str, RerankCall] = {
    "cohere": _cohere,
    "jina": _jina,
    "tei": _tei,
    "vllm": _vllm,
    "infinity": _infinity,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of a gateway in front of the built-in engine, a real Infinity and a real vLLM."""
    model = make_models(HOME / "models")["rerank"]
    config = tmp_path_factory.mktemp("gateway") / "router.yaml"
    with serve_model("infinity", model) as infinity, serve_model("vllm", model) as vllm:
        config.write_text(CONFIG.format(model=model, infinity=infinity, vllm=vllm))
        served = Served(config)
        try:
            with served.wait_until_up().client() as client:
                client.timeout = httpx.Timeout(120)
                yield client
        finally:
            served.stop()


@pytest.fixture(scope="module")
def queries() -> list[tuple[str, list[str]]]:
    """Return some queries with the same documents, one of which belongs to the query."""
    pairs = [pair for pair, _ in labelled_pairs()[:60]]
    documents = list(dict.fromkeys(document for _, document in pairs))[:25]
    return [(query, documents) for query, _ in pairs[:8:2]]


def _scores(ranks: list[tuple[int, float]]) -> Vectors:
    """Return the scores by index, (n_documents,) float32, and check that each index occurs once."""
    assert list(range(len(ranks))) == sorted(index for index, _ in ranks)
    return np.array([score for _, score in sorted(ranks)], np.float32)


@pytest.fixture(scope="module")
def expected(client: httpx.Client, queries: list[tuple[str, list[str]]]) -> list[Vectors]:
    """Return the built-in engine's scores."""
    return [_scores(_cohere(client, "torch", query, documents)) for query, documents in queries]


@pytest.mark.parametrize(("backend", "dialect"), list(product(BACKENDS, DIALECTS)))
def test_every_dialect_and_backend_orders_documents_alike(
    client: httpx.Client,
    queries: list[tuple[str, list[str]]],
    expected: list[Vectors],
    backend: str,
    dialect: str,
) -> None:
    greatest, compared = 0.0, 0
    for (query, documents), reference in zip(queries, expected, strict=True):
        scores = _scores(DIALECTS[dialect](client, backend, query, documents))
        apart = np.subtract.outer(reference, reference) > APART
        greatest = max(greatest, float(np.abs(reference - scores).max()))
        # A model with equal scores for all documents would prove nothing.
        assert np.ptp(reference) > 0.5
        compared += int(apart.sum())
        assert (np.subtract.outer(scores, scores)[apart] > 0).all()
    assert compared > 100
    print(f"{backend} over {dialect}: {compared} pairs in order, scores within {greatest:.4f}")  # noqa: T201
