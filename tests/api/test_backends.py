"""The routes mean the same over every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.vectors import sigmoid
from tests.conftest import Boots
from tests.fakes.checkpoint import write_small_files
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.server import FakeServer, logit_of
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

LONG = "w " * 20
TEXTS = ["red", "green and blue", "cyan", "pink", "a b c d e", "grey"]
TOKENS = sum(len(text.split()) + 2 for text in TEXTS)
REMOTE = ["tei", "infinity", "vllm", "openai"]
NEW = ["infinity", "vllm", "openai"]


def embedder(kind: str) -> Any:
    """A server of an embedding model."""
    match kind:
        case "infinity":
            return FakeInfinity()
        case "vllm":
            return FakeVllm()
        case "openai":
            return FakeOpenAI()
    return FakeTei()


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """One upstream of a kind; only Infinity needs the tokenizer."""
    kind = request.getfixturevalue("kind")
    tokenizer = f", tokenizer: {write_small_files(tmp_path)}" if kind == "infinity" else ""
    return f"""
upstreams: {{only: {{backend: {kind}, replicas: ["http://one"]{tokenizer}}}}}
models: {{m: {{upstream: only}}}}
"""


@pytest.mark.parametrize("kind", REMOTE)
async def test_openai_embeddings(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": TEXTS, "model": "m", "dimensions": 4})

    assert 200 == reply.status_code
    expected = np.array([vector_of(text)[:4] for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(expected, [one["embedding"] for one in reply.json()["data"]], rtol=1e-5)
    assert {"prompt_tokens": TOKENS, "total_tokens": TOKENS} == reply.json()["usage"]


@pytest.mark.parametrize("kind", REMOTE)
async def test_tei_embed(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        reply = await gateway.post("/embed", {"inputs": TEXTS})

    assert (200, str(TOKENS)) == (reply.status_code, reply.headers["x-compute-tokens"])
    np.testing.assert_allclose([vector_of(text) for text in TEXTS], reply.json(), rtol=1e-5)


@pytest.mark.parametrize("kind", REMOTE)
async def test_an_embedding_model_reranks_by_cosine(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        ranks = (await gateway.post("/rerank", {"query": "q", "texts": TEXTS})).json()

    cosines = {i: float(vector_of("q") @ vector_of(text)) for i, text in enumerate(TEXTS)}
    assert cosines == pytest.approx({rank["index"]: rank["score"] for rank in ranks}, abs=1e-6)


@pytest.mark.parametrize("kind", ["infinity", "vllm"])
@pytest.mark.parametrize("raw_scores", [True, False])
async def test_tei_rerank_by_a_cross_encoder(boot: Boots, config: str, kind: str, raw_scores: bool) -> None:
    server = FakeInfinity(capability="rerank") if kind == "infinity" else FakeVllm(task="classify")
    async with boot({"one": server}, config) as gateway:
        reply = await gateway.post("/rerank", {"query": "q", "texts": TEXTS, "raw_scores": raw_scores})

    logits = np.array([logit_of("q", text) for text in TEXTS], np.float32)
    expected = logits if raw_scores else sigmoid(logits)
    assert 200 == reply.status_code
    assert sorted(range(len(TEXTS)), key=lambda i: -expected[i]) == [rank["index"] for rank in reply.json()]
    np.testing.assert_allclose(
        sorted(expected, reverse=True), [rank["score"] for rank in reply.json()], rtol=1e-5
    )


@pytest.mark.parametrize("kind", REMOTE)
async def test_what_is_too_long_is_refused_where_nothing_may_be_cut(
    boot: Boots, config: str, kind: str
) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        reply = await gateway.post("/embed", {"inputs": LONG, "truncate": False})

    assert (422, "Validation") == (reply.status_code, reply.json()["error_type"])


@pytest.mark.parametrize("kind", ["infinity", "openai"])
async def test_what_a_wire_cannot_say_is_teis_424(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        reply = await gateway.post("/embed", {"inputs": "a", "normalize": False})

    assert (424, "Backend") == (reply.status_code, reply.json()["error_type"])


@pytest.mark.parametrize("kind", ["infinity", "vllm"])
async def test_tei_tokenize(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        reply = await gateway.post("/tokenize", {"inputs": ["red blue"]})

    assert 200 == reply.status_code
    assert [True, False, False, True] == [one["special"] for one in reply.json()[0]]


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize(
    "body", [b"<html>welcome</html>", b"", b'{"error":{"message":"no","code":500}}', b'{"data":[]}']
)
async def test_an_answer_that_is_none_is_502(boot: Boots, config: str, kind: str, body: bytes) -> None:
    server: FakeServer = embedder(kind)
    async with boot({"one": server}, config) as gateway:

        async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
            return 200, body

        server.hook = hook
        reply = await gateway.post("/v1/embeddings", {"input": "a", "model": "m"})

    assert (502, "upstream_failed") == (reply.status_code, reply.json()["error"]["code"])


@pytest.mark.parametrize("kind", NEW)
async def test_what_was_learnt_is_told_once_when_it_joins(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        lines = [one.reason for one in gateway.events if type(one).__name__ == "ReplicaChanged"]

    told = {"infinity": "Infinity", "vllm": "vLLM 0.32.0, raw vectors by use_activation", "openai": "OpenAI"}
    assert 1 == len(lines)
    assert told[kind] in lines[0]
