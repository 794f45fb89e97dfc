"""Gateways in front of Bedrock, Google's APIs and Hugging Face, on sockets, called in several dialects."""

import asyncio
import base64
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.events import ReplicaChanged
from gateway.upstreams.factory import server_of
from tests.conftest import Boots
from tests.fakes.bedrock import ACCESS_KEY, REGION, SECRET_KEY, FakeBedrock, wide_vector
from tests.fakes.google import PROJECT, FakeGemini, FakeVertex, refusal, retry_info
from tests.fakes.hooks import until
from tests.fakes.huggingface import MODEL, FakeRouter
from tests.fakes.server import FakeServer
from tests.fakes.tei import score_of, vector_of
from tests.fakes.threaded import serve_in_thread
from tests.pictures import encoded, noise
from tests.waiting import PATIENCE_S

TEXTS = ["red", "green and blue", "cyan"]
TITAN = "amazon.titan-embed-text-v2:0"
NOVA = "amazon.nova-2-multimodal-embeddings-v1:0"
BEDROCK = "backend: bedrock, bedrock: {region: us-east-1}"
VERTEX = f"backend: vertex, api_key: an-access-token, vertex: {{project: {PROJECT}, location: europe-west4}}"
HUGGING = f"backend: huggingface, model: {MODEL}, api_key: hf_a-token"
EMBEDDERS: dict[str, tuple[FakeServer, str, str]] = {
    "titan": (
        FakeBedrock("amazon.titan-embed-text-v2:0"),
        "",
        f"{BEDROCK}, model: 'amazon.titan-embed-text-v2:0'",
    ),
    "cohere": (FakeBedrock("cohere.embed-v4:0"), "", f"{BEDROCK}, model: 'cohere.embed-v4:0'"),
    "gemini": (
        FakeGemini("gemini-embedding-001"),
        "/v1beta",
        "backend: gemini, model: gemini-embedding-001, api_key: a-google-key",
    ),
    "vertex": (FakeVertex("gemini-embedding-001"), "", f"{VERTEX}, model: gemini-embedding-001"),
    "huggingface": (FakeRouter(), "/hf-inference/models", HUGGING),
}
RERANKERS: dict[str, tuple[FakeServer, str, str]] = {
    "cohere": (FakeBedrock("cohere.rerank-v3-5:0"), "", f"{BEDROCK}, model: 'cohere.rerank-v3-5:0'"),
    "amazon": (FakeBedrock("amazon.rerank-v1:0"), "", f"{BEDROCK}, model: 'amazon.rerank-v1:0'"),
    "vertex": (
        FakeVertex("semantic-ranker-default@latest"),
        "",
        f"{VERTEX}, model: semantic-ranker-default@latest",
    ),
    "huggingface": (FakeRouter(), "/hf-inference/models", f"{HUGGING}, huggingface: {{task: rerank}}"),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that serves a fake, and returns the config of a gateway in front of it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("AWS_PROFILE", "AWS_BEARER_TOKEN_BEDROCK", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:

        def serve(server: FakeServer, path: str, settings: str) -> str:
            server.requests.clear()
            server.hook = None
            url = stack.enter_context(serve_in_thread(server))
            return (
                f'upstreams: {{up: {{replicas: ["{url}{path}"], {settings}}}}}\n'
                "models: {m: {upstream: up}}\n"
            )

        yield serve


def rows_of(name: str) -> Any:
    """Return the vectors of the texts from a fake."""
    if name not in {"titan", "cohere"}:
        return np.stack([vector_of(text) for text in TEXTS])
    rows = np.stack([wide_vector(text, 1024 if name == "titan" else 1536) for text in TEXTS])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_embeds_in_openais_and_coheres_form(boot: Boots, served: Any, name: str) -> None:
    server, path, settings = EMBEDDERS[name]
    async with boot({}, served(server, path, settings), sockets=True) as gateway:
        reply = await gateway.post("/v1/embeddings", {"model": "m", "input": TEXTS})
        cohere = {"model": "m", "texts": TEXTS, "input_type": "search_query", "embedding_types": ["float"]}
        second = await gateway.post("/v2/embed", cohere)

    assert 200 == reply.status_code, reply.text
    np.testing.assert_allclose(
        rows_of(name), [item["embedding"] for item in reply.json()["data"]], rtol=1e-4, atol=1e-6
    )
    assert [0, 1, 2] == [item["index"] for item in reply.json()["data"]]
    assert reply.json()["usage"]["prompt_tokens"] >= 3
    assert 200 == second.status_code, second.text
    np.testing.assert_allclose(rows_of(name), second.json()["embeddings"]["float"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RERANKERS)
async def test_reranks_in_coheres_form(boot: Boots, served: Any, name: str) -> None:
    server, path, settings = RERANKERS[name]
    async with boot({}, served(server, path, settings), sockets=True) as gateway:
        body = {"model": "m", "query": "q", "documents": TEXTS, "top_n": 2}
        reply = await gateway.post("/v2/rerank", body)
        refused = await gateway.post("/v1/embeddings", {"model": "m", "input": "a"})

    assert 200 == reply.status_code, reply.text
    best = sorted(range(3), key=lambda i: -score_of("q", TEXTS[i]))[:2]
    assert best == [item["index"] for item in reply.json()["results"]]
    scores = [item["relevance_score"] for item in reply.json()["results"]]
    assert [score_of("q", TEXTS[i]) for i in best] == pytest.approx(scores, abs=1e-5)
    assert 400 == refused.status_code


async def test_texts_of_one_call_are_sent_one_by_one_side_by_side(boot: Boots, served: Any) -> None:
    server, path, settings = EMBEDDERS["titan"]
    config = served(server, path, f"{settings}, in_flight_batches: 4")
    flying = most = 0
    are_four = asyncio.Event()

    async def watch(*_: Any) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        if most == 4:
            are_four.set()
        await asyncio.wait_for(are_four.wait(), PATIENCE_S)
        flying -= 1

    async with boot({}, config, sockets=True) as gateway:
        server.requests.clear()
        server.hook = watch
        texts = [f"text {i}" for i in range(12)]
        reply = await gateway.post("/v1/embeddings", {"model": "m", "input": texts})

    assert 200 == reply.status_code, reply.text
    assert sorted(texts) == sorted(body["inputText"] for _, body in server.requests)
    assert 4 == most


async def test_quota_error_is_a_pause_and_no_ejection(boot: Boots, served: Any) -> None:
    server, path, settings = EMBEDDERS["vertex"]
    answers = [refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for a-project", retry_info("0.2s"))]

    async def refuse_once(_: str, __: dict[str, Any]) -> tuple[int, bytes] | None:
        return (answers[0].status, answers.pop().body) if answers else None

    async with boot({}, served(server, path, settings), sockets=True) as gateway:
        server.hook = refuse_once
        reply = await gateway.post("/v1/embeddings", {"model": "m", "input": "a"})
        changes = [event for event in gateway.events if isinstance(event, ReplicaChanged)]

    assert 200 == reply.status_code, reply.text
    assert [] == answers
    assert ["up"] == [change.state for change in changes]
    assert "Quota exceeded" not in reply.text


async def test_joining_costs_a_stated_number_of_requests(boot: Boots, served: Any) -> None:
    server, path, settings = EMBEDDERS["titan"]
    before = len(server.headers)
    async with boot({}, served(server, path, settings), sockets=True):
        # One short text, and the six reference texts.
        assert 7 == len(server.headers) - before

    server, path, settings = RERANKERS["cohere"]
    before = len(server.headers)
    async with boot({}, served(server, path, settings), sockets=True):
        # Three pairs, and the four of the check of rerankers.
        assert 2 == len(server.headers) - before


@pytest.mark.parametrize(
    ("name", "provider"),
    [("titan", "aws.bedrock"), ("gemini", "gcp.gemini"), ("vertex", "gcp.vertex_ai")],
)
def test_providers_have_opentelemetrys_names(name: str, provider: str) -> None:
    backend: Any = {"titan": "bedrock"}.get(name, name)
    found = server_of(backend, f"https://x.{REGION}.example.org")
    assert provider == found.provider


PICTURE = f"data:image/png;base64,{base64.b64encode(encoded(noise(9, 7, 1))).decode()}"
MULTIMODAL: dict[str, tuple[FakeServer, str, str]] = {
    "nova": (FakeBedrock(NOVA), "", f"{BEDROCK}, model: '{NOVA}'"),
    "cohere": (FakeBedrock("cohere.embed-v4:0"), "", f"{BEDROCK}, model: 'cohere.embed-v4:0'"),
    "gemini": (
        FakeGemini("gemini-embedding-2"),
        "/v1beta",
        "backend: gemini, model: gemini-embedding-2, api_key: a-google-key",
    ),
    "vertex": (FakeVertex("gemini-embedding-2"), "", f"{VERTEX}, model: gemini-embedding-2"),
}


@pytest.mark.parametrize("name", MULTIMODAL)
async def test_pictures_and_texts_share_a_call(boot: Boots, served: Any, name: str) -> None:
    server, path, settings = MULTIMODAL[name]
    async with boot({}, served(server, path, settings), sockets=True) as gateway:
        mixed = {"model": "m", "input": [{"image": PICTURE}, "a b"]}
        reply = await gateway.post("/v1/embeddings", mixed)
        alone = await gateway.post("/v1/embeddings", {"model": "m", "input": "a b"})

    assert 200 == reply.status_code, reply.text
    rows = [item["embedding"] for item in reply.json()["data"]]
    assert rows[1] == pytest.approx(alone.json()["data"][0]["embedding"], abs=1e-6)
    assert rows[0] != pytest.approx(rows[1], abs=1e-3)


async def test_callers_learn_that_the_gateway_has_no_credentials(
    boot: Boots, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    async with boot({}, served(*EMBEDDERS["titan"]), sockets=True) as gateway:
        await until(lambda: any(isinstance(event, ReplicaChanged) for event in gateway.events))
        reply = await gateway.post("/v1/embeddings", {"model": "m", "input": TEXTS})

    assert 503 == reply.status_code
    assert "the gateway has no credentials for this model's upstream" in reply.text
    assert "AWS" not in reply.text
