"""Every dialect works the same over every backend."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from tests.conftest import Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER, SPLADE
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.server import logit_of, token_rows
from tests.fakes.tei import FakeTei, logits_of, vector_of, weights_of
from tests.fakes.vllm import FakeVllm

LONG = "w " * 20
TEXTS = ["red", "green and blue", "cyan", "pink", "a b c d e", "grey"]
TOKENS = sum(len(text.split()) + 2 for text in TEXTS)
REMOTE = ["tei", "infinity", "vllm", "openai"]
NEW = ["infinity", "vllm", "openai"]


def embedder(kind: str) -> Any:
    """Return a server of an embedding model."""
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
    """Return a config with one upstream of a kind. Only Infinity needs the tokenizer."""
    kind = request.getfixturevalue("kind")
    tokenizer = f", tokenizer: {write_small_files(tmp_path)}" if kind == "infinity" else ""
    return f"""
upstreams: {{only: {{backend: {kind}, replicas: ["http://one"]{tokenizer}}}}}
models: {{m: {{upstream: only}}}}
"""


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS, "model": "m", "dimensions": 4}),
        ("/infinity/embeddings", {"input": TEXTS, "dimensions": 4}),
        ("/embed", {"inputs": TEXTS}),
        ("/models/m", {"inputs": TEXTS}),
        ("/pooling", {"input": TEXTS, "model": "m"}),
    ],
)
async def test_every_dialect_embeds_over_every_backend(
    boot: Boots, config: str, kind: str, path: str, body: dict[str, Any]
) -> None:
    reply = await posted(boot({"one": embedder(kind)}, config), path, body)

    assert 200 == reply.status_code
    found = reply.json()
    expected = np.array([vector_of(text)[: body.get("dimensions", 8)] for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    if isinstance(found, list):
        assert str(TOKENS) == reply.headers["x-compute-tokens"]
        np.testing.assert_allclose(expected, found, rtol=1e-5)
    else:
        assert (TOKENS, TOKENS) == (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"])
        rows = [item.get("embedding", item.get("data")) for item in found["data"]]
        np.testing.assert_allclose(expected, rows, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tei", "infinity", "openai"])
async def test_only_vllm_and_the_engine_read_conversations_and_bare_texts(
    boot: Boots, config: str, kind: str
) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        chat = await gateway.post("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]})
        bare = await gateway.post("/v1/embeddings", {"input": "a", "add_special_tokens": False})

    assert (400, 400) == (chat.status_code, bare.status_code)
    assert "`messages`" in chat.json()["error"]["message"]
    assert "`add_special_tokens: false`" in bare.json()["error"]["message"]


@pytest.mark.parametrize("kind", REMOTE)
async def test_an_embedding_model_reranks_by_cosine(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        ranks = (await gateway.post("/rerank", {"query": "q", "texts": TEXTS})).json()

    # Infinity's checkpoint has a prompt for queries, which sentence-transformers' encode_query uses.
    query = "query: q" if kind == "infinity" else "q"
    cosines = {i: float(vector_of(query) @ vector_of(text)) for i, text in enumerate(TEXTS)}
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
async def test_rejects_long_inputs_if_truncation_is_off(boot: Boots, config: str, kind: str) -> None:
    reply = await posted(boot({"one": embedder(kind)}, config), "/embed", {"inputs": LONG, "truncate": False})

    assert (422, "Validation") == (reply.status_code, reply.json()["error_type"])


@pytest.mark.parametrize("kind", REMOTE)
async def test_elasticsearch_halves_a_long_input_and_repeats(boot: Boots, config: str, kind: str) -> None:
    """By its rule: any other words in a 400 end the request. Cognee and pgai look for the first words."""
    strict = config.replace("m: {upstream: only}", "m: {upstream: only, truncate: error}")
    halved, text = 0, LONG
    async with boot({"one": embedder(kind)}, strict) as gateway:
        while (reply := await gateway.post("/v1/embeddings", {"input": [text]})).status_code != 200:
            message = reply.json()["error"]["message"]
            assert 400 == reply.status_code
            assert "Please reduce your prompt; or completion length." in message
            assert "This model's maximum context length is 16 tokens" in message
            halved, text = halved + 1, text[: len(text) // 2]

    assert 1 == halved


@pytest.mark.parametrize("kind", ["infinity", "openai"])
async def test_replies_424_to_options_that_the_backend_cannot_express(
    boot: Boots, config: str, kind: str
) -> None:
    reply = await posted(boot({"one": embedder(kind)}, config), "/embed", {"inputs": "a", "normalize": False})

    assert (424, "Backend") == (reply.status_code, reply.json()["error_type"])


@pytest.mark.parametrize("kind", ["infinity", "vllm"])
async def test_tei_tokenize(boot: Boots, config: str, kind: str) -> None:
    reply = await posted(boot({"one": embedder(kind)}, config), "/tokenize", {"inputs": ["red blue"]})

    assert 200 == reply.status_code
    assert [True, False, False, True] == [item["special"] for item in reply.json()[0]]


@pytest.mark.parametrize("kind", NEW)
async def test_reports_a_replicas_capabilities_once_when_it_joins(
    boot: Boots, config: str, kind: str
) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        lines = [event.reason for event in gateway.events if type(event).__name__ == "ReplicaChanged"]

    expected = {
        "infinity": "Infinity",
        "vllm": "vLLM 0.32.0, raw vectors by use_activation",
        "openai": "OpenAI",
    }
    assert 1 == len(lines)
    assert expected[kind] in lines[0]


LABELLED = {
    "tei": lambda: FakeTei(model_type=CLASSIFIER),
    "infinity": lambda: FakeInfinity(capability="classify"),
    "vllm": lambda: FakeVllm(task="classify", classes=len(LABELS)),
}
SCORING = {
    "tei": lambda: FakeTei(model_type=RERANKER),
    "infinity": lambda: FakeInfinity(capability="rerank"),
    "vllm": lambda: FakeVllm(task="classify"),
}
SPARSE = {"tei": lambda: FakeTei(model_type=SPLADE), "vllm": lambda: FakeVllm(splade=True)}
TOKEN_VECTORS = {"tei": (FakeTei, 3), "vllm": (lambda: FakeVllm(task="token_embed"), 2)}
LATE = {
    "infinity": lambda: FakeInfinity(late=True),
    "vllm": lambda: FakeVllm(task="token_embed"),
}


@pytest.mark.parametrize("kind", LABELLED)
async def test_every_classifier_returns_the_same_labels_in_every_dialect(
    boot: Boots, config: str, kind: str, tmp_path: Path
) -> None:
    # vLLM reports no label names, therefore they are read from the checkpoint's files.
    labelled_config = config.replace("{backend: vllm,", f"{{backend: vllm, tokenizer: {tmp_path},")
    write_small_files(tmp_path, labels=LABELS)
    async with boot({"one": LABELLED[kind]()}, labelled_config) as gateway:
        tei = await gateway.post("/predict", {"inputs": [[text] for text in TEXTS]})
        vllm = await gateway.post("/classify", {"input": TEXTS})
        infinity = await gateway.post("/infinity/classify", {"input": TEXTS})

    logits = np.array([logits_of((text,), len(LABELS)) for text in TEXTS])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    by_label = [[{item["label"]: item["score"] for item in items} for items in tei.json()]]
    by_label.append([{item["label"]: item["score"] for item in items} for items in infinity.json()["data"]])
    for rows in by_label:
        np.testing.assert_allclose(expected, [[row[label] for label in LABELS] for row in rows], rtol=1e-5)
    np.testing.assert_allclose(expected, [item["probs"] for item in vllm.json()["data"]], rtol=1e-5)
    assert [LABELS[i] for i in expected.argmax(axis=1)] == [item["label"] for item in vllm.json()["data"]]
    assert [str(TOKENS), TOKENS, TOKENS] == [
        tei.headers["x-compute-tokens"],
        vllm.json()["usage"]["total_tokens"],
        infinity.json()["usage"]["total_tokens"],
    ]


@pytest.mark.parametrize("kind", SCORING)
async def test_every_cross_encoder_scores_pairs(boot: Boots, config: str, kind: str) -> None:
    pairs = [("q", text) for text in TEXTS] + [("r", text) for text in TEXTS]
    body = {"queries": [a for a, _ in pairs], "documents": [b for _, b in pairs], "use_activation": False}
    reply = await posted(boot({"one": SCORING[kind]()}, config), "/score", body)

    expected = [logits_of(pair, 1)[0] if kind == "tei" else logit_of(*pair) for pair in pairs]
    assert 200 == reply.status_code, reply.text
    np.testing.assert_allclose(expected, [item["score"] for item in reply.json()["data"]], rtol=1e-5)


@pytest.mark.parametrize("kind", REMOTE)
async def test_every_embedding_model_scores_pairs_by_cosine(boot: Boots, config: str, kind: str) -> None:
    pairs = [("q", text) for text in TEXTS] + [("r", text) for text in TEXTS]
    body = {"queries": [a for a, _ in pairs], "documents": [b for _, b in pairs]}
    reply = await posted(boot({"one": embedder(kind)}, config), "/score", body)

    expected = [float(vector_of(a) @ vector_of(b)) for a, b in pairs]
    np.testing.assert_allclose(expected, [item["score"] for item in reply.json()["data"]], atol=1e-6)


@pytest.mark.parametrize("kind", SPARSE)
async def test_every_sparse_model_returns_the_same_terms(boot: Boots, config: str, kind: str) -> None:
    reply = await posted(boot({"one": SPARSE[kind]()}, config), "/embed_sparse", {"inputs": TEXTS})

    weights = [{term["index"]: term["value"] for term in terms} for terms in reply.json()]
    assert [weights_of(text) for text in TEXTS] == weights


@pytest.mark.parametrize("kind", TOKEN_VECTORS)
async def test_every_backend_with_token_vectors_returns_them(boot: Boots, config: str, kind: str) -> None:
    make, scale = TOKEN_VECTORS[kind]
    async with boot({"one": make()}, config) as gateway:
        raw = await gateway.post("/embed_all", {"inputs": TEXTS})
        plain = await gateway.post("/pooling", {"input": TEXTS, "task": "token_embed"})

    for text, rows, scaled in zip(TEXTS, raw.json(), plain.json()["data"], strict=True):
        np.testing.assert_allclose(token_rows(text) * scale, rows, rtol=1e-5)
        np.testing.assert_allclose(token_rows(text), scaled["data"], rtol=1e-5)


@pytest.mark.parametrize("kind", LATE)
async def test_every_backend_with_late_interaction_returns_multivectors(
    boot: Boots, config: str, kind: str
) -> None:
    async with boot({"one": LATE[kind]()}, config) as gateway:
        reply = await gateway.post("/pooling", {"input": TEXTS, "task": "token_embed"})

    for text, item in zip(TEXTS, reply.json()["data"], strict=True):
        np.testing.assert_allclose(token_rows(text), item["data"], rtol=1e-5)


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/predict", {"inputs": "a"}, "424 no model here does classify"),
        (
            "/embed_sparse",
            {"inputs": "a"},
            "424 (no model here does encode|this .* model gives no sparse output)",
        ),
        ("/classify", {"input": "a"}, "400 no model here does classify"),
        ("/infinity/classify", {"input": ["a"]}, "400 no model here does classify"),
        ("/pooling", {"input": "a", "task": "classify"}, "400 the model 'm' does not classify"),
    ],
)
async def test_rejects_operations_that_an_embedding_model_lacks(
    boot: Boots, config: str, kind: str, path: str, body: dict[str, Any], error: str
) -> None:
    reply = await posted(boot({"one": embedder(kind)}, config), path, body)

    status, message = error.split(" ", 1)
    assert int(status) == reply.status_code
    assert re.search(f'"{message}"', reply.text)


@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_decodes_ids_over_every_backend(boot: Boots, config: str, kind: str) -> None:
    async with boot({"one": embedder(kind)}, config) as gateway:
        tei = await gateway.post("/decode", {"ids": [[0], [0, 0]]})
        vllm = await gateway.post("/detokenize", {"tokens": [0, 0]})

    word = "[UNK]" if kind == "infinity" else "t0"
    assert [word, f"{word} {word}"] == tei.json()
    assert {"prompt": f"{word} {word}"} == vllm.json()


@pytest.mark.parametrize("kind", ["infinity", "vllm"])
async def test_nims_ranking_has_logits_best_first(boot: Boots, config: str, kind: str) -> None:
    server = FakeInfinity(capability="rerank") if kind == "infinity" else FakeVllm(task="classify")
    body = {"query": {"text": "q"}, "passages": [{"text": text} for text in TEXTS], "truncate": "END"}
    reply = await posted(boot({"one": server}, config), "/v1/ranking", body)

    logits = {index: logit_of("q", text) for index, text in enumerate(TEXTS)}
    rankings = reply.json()["rankings"]
    assert sorted(logits, key=lambda index: -logits[index]) == [ranking["index"] for ranking in rankings]
    assert logits == pytest.approx({ranking["index"]: ranking["logit"] for ranking in rankings}, rel=1e-5)
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    assert 0 == usage["completion_tokens"]


HOSTED_RANKINGS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/retrieval/nvidia/reranking", {}, "m"),
    ("/v1/retrieval/m/reranking", {}, "m"),
    ("/v1/retrieval/nvidia/llama-3_2-rerank/reranking", {"model": "m"}, "m"),
    ("/v1/retrieval/nvidia/llama-3_2-rerank/reranking", {}, None),
]


@pytest.mark.parametrize("kind", ["infinity"])
@pytest.mark.parametrize(("path", "named", "model"), HOSTED_RANKINGS)
async def test_ranks_at_the_paths_of_nvidias_hosted_api(
    boot: Boots, config: str, kind: str, path: str, named: dict[str, Any], model: str | None
) -> None:
    """The body names the model where the path spells it differently, as RAGFlow and Weaviate send it."""
    body = {"query": {"text": "q"}, "passages": [{"text": text} for text in TEXTS], "top_n": 2} | named
    async with boot({"one": FakeInfinity(capability="rerank")}, config) as gateway:
        reply = await gateway.post(path, body)
        ranked = await gateway.post("/v1/ranking", body | {"model": "m"})

    if model is None:
        assert (404, "model_not_found") == (reply.status_code, reply.json()["error"]["code"])
    else:
        assert ranked.json()["rankings"] == reply.json()["rankings"]
        assert 2 == len(reply.json()["rankings"])
