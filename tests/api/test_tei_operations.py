"""TEI's other operations: sparse and token vectors, labels, token ids, and POST /."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from gateway.api.server.responses import ARROW
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from tests.conftest import Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER, SPLADE
from tests.fakes.server import logit_of, token_rows
from tests.fakes.tei import FakeTei, logits_of, score_of, vector_of, weights_of
from tests.fakes.vllm import FakeVllm

CONFIG = """
upstreams:
  embedder: {backend: tei, replicas: ["http://embed"]}
  splade: {backend: tei, replicas: ["http://sparse"]}
  reranker: {backend: tei, replicas: ["http://cross"]}
  classifier: {backend: tei, replicas: ["http://classes"]}
models:
  org/bge: {upstream: embedder}
  splade: {upstream: splade}
  cross: {upstream: reranker}
  moods: {upstream: classifier}
defaults: {embed: org/bge, rerank: cross, classify: moods}
"""
TEXTS = ["red", "green and blue", "cyan", "pink", "grey"]


def fakes() -> dict[str, FakeTei]:
    """Return a server for each kind of model."""
    return {
        "embed": FakeTei(),
        "sparse": FakeTei(model_type=SPLADE),
        "cross": FakeTei(model_type=RERANKER),
        "classes": FakeTei(model_type=CLASSIFIER),
    }


def tokens_of(texts: Sequence[str]) -> str:
    """Return the token count of the header."""
    return str(sum(len(text.split()) + 2 for text in texts))


@pytest.mark.parametrize("path", ["/embed_sparse", "/models/splade/embed_sparse"])
async def test_sparse_splits_more_texts_than_one_request_holds(boot: Boots, path: str) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, {"inputs": TEXTS, "model": "splade"})

    assert (200, tokens_of(TEXTS)) == (reply.status_code, reply.headers["x-compute-tokens"])
    weights = [{term["index"]: term["value"] for term in terms} for terms in reply.json()]
    assert [weights_of(text) for text in TEXTS] == weights
    assert all(sorted(term) == list(term) for term in weights)


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Return a config whose sparse model has a tokenizer; the last term of four words is beyond it."""
    file = write_small_files(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {"red": 900, "##dish": 800, ".": 700}
    file.write_text(json.dumps(tokenizer))
    return CONFIG.replace('["http://sparse"]', f'["http://sparse"], tokenizer: "{tmp_path}"')


async def test_opensearch_reads_tokens_and_their_weights(boot: Boots, words: str) -> None:
    """Its neural search reads a list of objects, one for each text, from token to number."""
    texts = ["a", "a b", "a b c d"]
    async with boot(fakes(), words) as gateway:
        body = {"inputs": texts, "model": "splade"}
        reply = await gateway.post("/embed_sparse", body | {"return_tokens": True})
        terms = (await gateway.post("/embed_sparse", body)).json()

    assert 200 == reply.status_code, reply.text
    names = {900: "red", 800: "##dish", 700: ".", 600: "[600]"}
    assert [{names[term["index"]]: term["value"] for term in row} for row in terms] == reply.json()
    assert tokens_of(texts) == reply.headers["x-compute-tokens"]


async def test_tokens_need_the_models_tokenizer_and_json(boot: Boots, words: str) -> None:
    body = {"inputs": "a", "model": "splade", "return_tokens": True}
    async with boot(fakes(), CONFIG) as gateway:
        unknown = await gateway.post("/embed_sparse", body)
    async with boot(fakes(), words) as gateway:
        arrow = await gateway.post("/embed_sparse", body, accept=ARROW)
    async with boot({}, words) as gateway:
        away = await gateway.post("/embed_sparse", body)

    assert (422, True) == (unknown.status_code, "needs the model's tokenizer" in unknown.json()["error"])
    assert (422, True) == (arrow.status_code, "`return_tokens`" in arrow.json()["error"])
    assert (503, "Unhealthy") == (away.status_code, away.json()["error_type"])


@pytest.mark.parametrize("path", ["/embed_all", "/models/org/bge/embed_all"])
async def test_token_vectors_split_more_texts_than_one_request_holds(boot: Boots, path: str) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, {"inputs": TEXTS})

    assert (200, tokens_of(TEXTS)) == (reply.status_code, reply.headers["x-compute-tokens"])
    for text, rows in zip(TEXTS, reply.json(), strict=True):
        np.testing.assert_allclose(token_rows(text) * 3, rows, rtol=1e-6)


async def test_one_input_returns_a_list_of_one(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        sparse = await gateway.post("/embed_sparse", {"inputs": "red", "model": "splade"})
        token_vectors = await gateway.post("/embed_all", {"inputs": "red"})

    assert (1, 1) == (len(sparse.json()), len(token_vectors.json()))


def predictions(item: tuple[str, ...], labels: Sequence[str], *, raw: bool = False) -> dict[str, float]:
    """Return the scores that the server gives a text or pair, by label."""
    logits = np.array(logits_of(item, len(labels)))
    shares = np.exp(logits) / np.exp(logits).sum() if len(labels) > 1 else sigmoid(logits)
    return dict(zip(labels, (logits if raw else shares).tolist(), strict=True))


def assert_predictions(expected: dict[str, float], items: list[dict[str, Any]]) -> None:
    """Check that the items are the expected labels, best first."""
    assert sorted(expected, key=lambda label: -expected[label]) == [item["label"] for item in items]
    assert expected == pytest.approx({item["label"]: item["score"] for item in items}, rel=1e-5)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("inputs", "item"), [("red", ("red",)), (["red"], ("red",)), (["a", "b"], ("a", "b"))]
)
async def test_predict_returns_a_flat_list_for_one_text_or_pair(
    boot: Boots, inputs: Any, item: tuple[str, ...], raw: bool
) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/predict", {"inputs": inputs, "raw_scores": raw})

    assert 200 == reply.status_code
    assert_predictions(predictions(item, LABELS, raw=raw), reply.json())


async def test_predict_returns_a_list_of_lists_for_a_batch(boot: Boots) -> None:
    batch = [["red"], ["a", "b"], ["blue"], ["cyan"], ["pink", ""]]
    reply = await posted(boot(fakes(), CONFIG), "/models/moods/predict", {"inputs": batch})

    for item, labels in zip(batch, reply.json(), strict=True):
        assert_predictions(predictions(tuple(item), LABELS), labels)
    assert 0 < int(reply.headers["x-compute-tokens"])


@pytest.mark.parametrize(
    "inputs", ["red", ["q", "red"], [["q", "red"], ["r", "blue"]], [["red"], ["q", "r"]]]
)
async def test_a_reranker_predicts_its_label(boot: Boots, inputs: Any) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/models/cross/predict", {"inputs": inputs})

    batch = isinstance(inputs[0], list)
    one = [inputs] if isinstance(inputs, str) else inputs
    items, predicted = (inputs, reply.json()) if batch else ([one], [reply.json()])
    for item, labels in zip(items, predicted, strict=True):
        assert_predictions(predictions(tuple(item), ["LABEL_0"]), labels)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/predict", {"inputs": []}, 422, "Validation"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation"),
        ("/predict", {"inputs": [[]]}, 422, "Validation"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "Validation"),
        ("/predict", {"inputs": ["a", ["b"]]}, 422, "Validation"),
        ("/predict", {"inputs": [[["a"]]]}, 422, "Validation"),
        ("/predict", {"inputs": 7}, 422, "Validation"),
        ("/predict", {"inputs": ""}, 400, "Empty"),
        ("/predict", {"inputs": [""]}, 400, "Empty"),
        ("/predict", {"inputs": ["", ""]}, 400, "Empty"),
        ("/predict", {"inputs": [["a"], [""]]}, 400, "Empty"),
        ("/predict", {"inputs": [["a"]] * 2049}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [[]]}, 400, "Empty"),
        ("/decode", {"ids": [1, [2]]}, 422, "Validation"),
        ("/decode", {"ids": ["a"]}, 422, "Validation"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": [2**32]}, 422, "Validation"),
        ("/decode", {"ids": [[10**30]]}, 422, "Validation"),
        ("/decode", {"ids": [[1]] * 2049}, 422, "Validation"),
        ("/decode", {"ids": None}, 422, "Validation"),
        ("/", {}, 422, "Validation"),
        ("/", {"query": "q", "texts": ["a"]}, 422, "Validation"),
        ("/models/cross", {"inputs": "a"}, 422, "Validation"),
        ("/models/cross", {"query": "q", "texts": []}, 400, "Empty"),
        ("/models/moods", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 424, "Backend"),
        ("/models/nothing", {"inputs": "a"}, 404, "NotFound"),
        # Operations that the model lacks.
        ("/predict", {"inputs": "a", "model": "org/bge"}, 424, "Backend"),
        ("/predict", {"inputs": ["a", "b"], "model": "org/bge"}, 424, "Backend"),
        ("/embed_sparse", {"inputs": "a", "model": "org/bge"}, 424, "Backend"),
        ("/embed_all", {"inputs": "a", "model": "splade"}, 424, "Backend"),
        ("/embed", {"inputs": "a", "model": "splade"}, 424, "Backend"),
        ("/embed_sparse", {"inputs": "a", "model": "moods"}, 424, "Backend"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_refuses_a_body_of_another_shape_or_operation(
    boot: Boots, path: str, body: Any, status: int, kind: str
) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, body)

    assert (status, kind) == (reply.status_code, reply.json()["error_type"])
    assert {"error", "error_type"} == reply.json().keys()


async def test_token_vectors_are_bounded_by_the_tokens_that_the_model_reads(boot: Boots) -> None:
    servers = {**fakes(), "embed": FakeTei(max_input_length=40_000)}
    async with boot(servers, CONFIG) as gateway:
        long = await gateway.post("/embed_all", {"inputs": ["w " * 20_000] * 2})
    async with boot(fakes(), CONFIG) as gateway:
        cut = await gateway.post("/embed_all", {"inputs": ["w " * 20_000] * 2})

    assert (422, "Validation") == (long.status_code, long.json()["error_type"])
    assert (200, 2) == (cut.status_code, len(cut.json()))


async def test_a_request_without_a_model_prefers_a_classifier_to_a_reranker(boot: Boots) -> None:
    config = CONFIG.replace("defaults: {embed: org/bge, rerank: cross, classify: moods}", "")
    reply = await posted(boot(fakes(), config), "/predict", {"inputs": "a"})

    assert set(LABELS) == {item["label"] for item in reply.json()}


@pytest.mark.parametrize(("query", "texts"), [("", ["red"]), ("q", [""])])
async def test_a_reranker_scores_an_empty_query_and_empty_texts(
    boot: Boots, query: str, texts: list[str]
) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/rerank", {"query": query, "texts": texts})

    assert [{"index": 0, "score": pytest.approx(score_of(query, texts[0]), rel=1e-6)}] == reply.json()


async def test_the_query_counts_its_characters_with_each_text(boot: Boots) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/rerank", {"query": "four", "texts": ["red", "blue"]})

    assert str(2 * len("four") + len("redblue")) == reply.headers["x-compute-characters"]


@pytest.mark.parametrize(
    ("ids", "skip", "texts"),
    [
        ([101, 7, 102], True, ["t7"]),
        ([[101, 7, 102], [8]], True, ["t7", "t8"]),
        ([[101, 7, 102], [8]], False, ["t101 t7 t102", "t8"]),
        ([[i] for i in range(10)], True, [f"t{i}" for i in range(10)]),
    ],
)
async def test_ids_are_decoded(boot: Boots, ids: Any, skip: bool, texts: list[str]) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/decode", {"ids": ids, "skip_special_tokens": skip})

    assert (200, texts) == (reply.status_code, reply.json())


@pytest.mark.parametrize("path", ["", "/"])
async def test_base_url_runs_the_models_default_operation(boot: Boots, path: str) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        embedded = await gateway.post(f"/models/org/bge{path}", {"inputs": TEXTS, "normalize": False})
        sparse = await gateway.post(f"/models/splade{path}", {"inputs": "red"})
        ranks = await gateway.post(
            f"/models/cross{path}", {"query": "q", "texts": TEXTS, "return_text": True}
        )
        labels = await gateway.post(f"/models/moods{path}", {"inputs": [["red"]]})

    np.testing.assert_allclose([vector_of(text) * 2 for text in TEXTS], embedded.json(), rtol=1e-6)
    assert [weights_of("red")] == [
        {term["index"]: term["value"] for term in terms} for terms in sparse.json()
    ]
    best = max(TEXTS, key=lambda text: score_of("q", text))
    assert (best, 5) == (ranks.json()[0]["text"], len(ranks.json()))
    assert_predictions(predictions(("red",), LABELS), labels.json()[0])


async def test_root_runs_the_default_model(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        embedded = await gateway.post("/", {"inputs": "red"})
        labels = await gateway.post("/", {"inputs": "red", "model": "moods"})

    np.testing.assert_allclose([vector_of("red")], embedded.json(), rtol=1e-6)
    assert_predictions(predictions(("red",), LABELS), labels.json())


async def test_base_url_compares_sentences(boot: Boots) -> None:
    inputs = {"source_sentence": "red", "sentences": ["blue", "red"]}
    reply = await posted(boot(fakes(), CONFIG), "/models/org/bge", {"inputs": inputs, "parameters": {}})

    assert [float(vector_of("red") @ vector_of("blue")), 1.0] == pytest.approx(reply.json(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("org/bge", {"embedding": {"pooling": "cls"}}),
        ("splade", {"embedding": {"pooling": "splade"}}),
        ("cross", RERANKER),
        (
            "moods",
            {
                "classifier": {
                    "id2label": {"0": "joy", "1": "anger", "2": "fear"},
                    "label2id": {"joy": 0, "anger": 1, "fear": 2},
                }
            },
        ),
    ],
)
async def test_info_shows_the_kind_of_model(boot: Boots, name: str, model_type: Any) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.client.get(f"/models/{name}/info")

    assert model_type == reply.json()["model_type"]


IDS_CONFIG = """
upstreams:
  embedder: {{backend: tei, replicas: ["http://embed"], token_encoding: {folder}}}
  other: {{backend: vllm, replicas: ["http://classes"], token_encoding: /nowhere}}
models:
  bge: {{upstream: embedder}}
  lost: {{upstream: other}}
"""


OWN_IDS = """
upstreams:
  embedder: {{backend: tei, replicas: ["http://embed"], tokenizer: {folder}, token_encoding: model}}
models: {{bge: {{upstream: embedder}}}}
"""


@pytest.fixture
def ids_config(tmp_path: Any) -> str:
    """Return a config with a small vocabulary: 0 [UNK], 1 [CLS], 2 [SEP]."""
    return IDS_CONFIG.format(folder=write_small_files(tmp_path))


@pytest.mark.parametrize(
    ("ids", "sent"),
    [
        ([0, 0], ["[UNK] [UNK]"]),
        ([1, 0, 2], ["[UNK]"]),
        ([[0], [0, 0]], ["[UNK]", "[UNK] [UNK]"]),
        (["red", [0]], ["red", "[UNK]"]),
    ],
    ids=str,
)
@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), ("/embed", "inputs")])
async def test_decodes_input_ids_of_the_configs_vocabulary(
    boot: Boots, ids_config: str, path: str, field: str, ids: Any, sent: list[str]
) -> None:
    servers = {"embed": FakeTei(), "classes": FakeVllm()}
    reply = await posted(boot(servers, ids_config), path, {field: ids, "model": "bge"})

    assert 200 == reply.status_code, reply.text
    assert sent == servers["embed"].requests[-1][1]["input"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ids", "sent"),
    [
        ([1, 0, 2], ["[UNK]"]),
        ([0, 0], ["[UNK] [UNK]"]),
        ([[1, 0], [0, 2, 0, 2]], ["[UNK]", "[UNK] [SEP] [UNK]"]),
    ],
    ids=str,
)
async def test_decodes_input_ids_of_the_models_own_vocabulary(
    boot: Boots, tmp_path: Path, ids: Any, sent: list[str]
) -> None:
    """Only the special tokens that the tokenizer adds are left out, because it adds them again."""
    server = FakeTei()
    config = OWN_IDS.format(folder=write_small_files(tmp_path))
    reply = await posted(boot({"embed": server}, config), "/embed", {"inputs": ids})

    assert 200 == reply.status_code, reply.text
    assert sent == server.requests[-1][1]["input"]


async def test_a_tokenizer_is_needed_for_ids_of_the_models_own_vocabulary(tmp_path: Path) -> None:
    config = OWN_IDS.format(folder="x").replace("tokenizer: x, ", "")

    with pytest.raises(ConfigError, match=r"upstreams\.embedder\.tokenizer: is missing"):
        parse_config(config, {}, tmp_path)


@pytest.mark.parametrize(
    ("ids", "model", "status"),
    [
        ([4711], "bge", 400),
        ([-1], "bge", 400),
        ([2**40], "bge", 400),
        ([1, 2], "bge", 400),
        ([[0], []], "bge", 400),
        ([0] * 3 + [[0]], "bge", 400),
        ([[0]] * 2049, "bge", 400),
        ([0], "lost", 502),
        ([0], "nothing", 404),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_rejects_ids_that_do_not_decode(
    boot: Boots, ids_config: str, ids: Any, model: str, status: int
) -> None:
    async with boot({"embed": FakeTei(), "classes": FakeVllm()}, ids_config) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": ids, "model": model})

    assert status == reply.status_code, reply.text
    assert reply.json()["error"]["message"]


def test_fake_logits_differ() -> None:
    assert logit_of("q", "red") != logit_of("q", "blue")
