"""One cross-encoder at three homes: every dialect orders the same documents the same, whichever serves."""

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

# Scores closer than this may change places: vLLM computes in bfloat16.
APART = 2e-2
HOMES = ("torch", "infinity", "vllm")
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


def _sent(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _cohere(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": documents}
    return [(one["index"], one["relevance_score"]) for one in _sent(client, "/v2/rerank", body)["results"]]


def _jina(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": [{"text": one} for one in documents]}
    return [(one["index"], one["relevance_score"]) for one in _sent(client, "/v1/rerank", body)["results"]]


def _tei(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"query": query, "texts": documents}
    return [(one["index"], one["score"]) for one in _sent(client, f"/models/{model}/rerank", body)]


def _vllm(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "queries": query, "documents": documents}
    return [(one["index"], one["score"]) for one in _sent(client, "/v1/score", body)["data"]]


def _infinity(client: httpx.Client, model: str, query: str, documents: list[str]) -> Any:
    body = {"model": model, "query": query, "documents": documents}
    found = _sent(client, "/infinity/rerank", body)["results"]
    return [(one["index"], one["relevance_score"]) for one in found]


DIALECTS: dict[str, RerankCall] = {
    "cohere": _cohere,
    "jina": _jina,
    "tei": _tei,
    "vllm": _vllm,
    "infinity": _infinity,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a gateway in front of the built-in engine, a real Infinity and a real vLLM."""
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
def asked() -> list[tuple[str, list[str]]]:
    """Some queries, each with the same documents, of which one is its own."""
    pairs = [pair for pair, _ in labelled_pairs()[:60]]
    documents = list(dict.fromkeys(document for _, document in pairs))[:25]
    return [(query, documents) for query, _ in pairs[:8:2]]


def _scores(ranks: list[tuple[int, float]]) -> Vectors:
    """(n_documents,) float32, by index; each index once."""
    assert list(range(len(ranks))) == sorted(index for index, _ in ranks)
    return np.array([score for _, score in sorted(ranks)], np.float32)


@pytest.fixture(scope="module")
def expected(client: httpx.Client, asked: list[tuple[str, list[str]]]) -> list[Vectors]:
    """The built-in engine's scores."""
    return [_scores(_cohere(client, "torch", query, documents)) for query, documents in asked]


@pytest.mark.parametrize(("home", "dialect"), list(product(HOMES, DIALECTS)))
def test_every_dialect_and_backend_orders_documents_alike(
    client: httpx.Client,
    asked: list[tuple[str, list[str]]],
    expected: list[Vectors],
    home: str,
    dialect: str,
) -> None:
    greatest, compared = 0.0, 0
    for (query, documents), one in zip(asked, expected, strict=True):
        other = _scores(DIALECTS[dialect](client, home, query, documents))
        apart = np.subtract.outer(one, one) > APART
        greatest = max(greatest, float(np.abs(one - other).max()))
        # A model that scores all alike would show nothing.
        assert np.ptp(one) > 0.5
        compared += int(apart.sum())
        assert (np.subtract.outer(other, other)[apart] > 0).all()
    assert compared > 100
    print(f"{home} over {dialect}: {compared} pairs in order, scores within {greatest:.4f}")  # noqa: T201
