"""Text Embeddings Inference's endpoints, at the root and below /models/{name}/."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from backends.contract import Capabilities, Operation
from gateway.api.dialects.tei import info as tei
from tests.conftest import Boots, posted
from tests.fakes.hooks import RERANKER, respond_with, tei_with_hook
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei, score_of, vector_of

LONG = "w " * 20
TEXTS = ["red", "green", "blue", "", "cyan", "pink"]


def sent_to(server: FakeTei) -> tuple[str, dict[str, Any]]:
    """Return the only request that reached a server."""
    (request,) = server.requests
    return request


@pytest.mark.parametrize("inputs", ["a", ["a"], [f"text {i}" for i in range(10)]])
async def test_embed_returns_a_list_of_vectors_in_input_order(boot: Boots, inputs: Any) -> None:
    reply = await posted(boot(fakes()), "/embed", {"inputs": inputs})

    assert 200 == reply.status_code
    expected = [vector_of(text) for text in ([inputs] if isinstance(inputs, str) else inputs)]
    np.testing.assert_array_equal(expected, np.array(reply.json(), np.float32))


@pytest.mark.parametrize(("normalize", "length"), [(True, 1.0), (False, 2.0)])
async def test_normalize_decides_the_length(boot: Boots, normalize: bool, length: float) -> None:
    reply = await posted(boot(fakes()), "/embed", {"inputs": "a", "normalize": normalize})

    np.testing.assert_allclose(vector_of("a") * length, reply.json()[0], rtol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [1, 4, 8])
async def test_dimensions_cut_before_normalizing(boot: Boots, dimensions: int, normalize: bool) -> None:
    body = {"inputs": "a", "dimensions": dimensions, "normalize": normalize}
    reply = await posted(boot(fakes()), "/embed", body)

    (vector,) = reply.json()
    assert dimensions == len(vector)
    assert not normalize or np.linalg.norm(vector) == pytest.approx(1.0, rel=1e-6)


async def test_prompt_name_reaches_the_server(boot: Boots) -> None:
    servers = fakes()
    reply = await posted(boot(servers), "/embed", {"inputs": "a", "prompt_name": "query"})

    assert 200 == reply.status_code
    assert "query" == sent_to(servers["tei-0"])[1]["prompt_name"]


async def test_unknown_prompt_is_an_error_of_the_caller(boot: Boots) -> None:
    refusal = {"error": "Input validation error: unknown prompt", "error_type": "Validation"}
    server = tei_with_hook(respond_with(422, json.dumps(refusal).encode()))
    reply = await posted(boot({"tei-0": server}), "/embed", {"inputs": "a", "prompt_name": "nowhere"})

    assert (422, "Validation") == (reply.status_code, reply.json()["error_type"])
    assert "unknown prompt" in reply.json()["error"]


@pytest.mark.parametrize(
    ("model", "options", "status"),
    [
        ("bge", {}, 200),
        ("bge", {"truncate": None}, 200),
        ("bge", {"truncate": True}, 200),
        ("bge", {"truncate": False}, 422),
        ("bge", {"truncate": False, "truncation_direction": "left"}, 422),
        ("strict", {}, 422),
        ("strict", {"truncate": None}, 422),
        ("strict", {"truncate": True}, 200),
        # As in TEI, a direction selects the side to cut but does not enable truncation.
        ("strict", {"truncation_direction": "left"}, 422),
        ("strict", {"truncate": None, "truncation_direction": "Left"}, 422),
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/similarity"])
async def test_truncate_decides_whether_long_inputs_are_cut(
    boot: Boots, path: str, model: str, options: dict[str, Any], status: int
) -> None:
    similarity = {"inputs": {"source_sentence": LONG, "sentences": ["a"]}, "parameters": options}
    body = {"inputs": LONG, **options} if path == "/embed" else similarity
    reply = await posted(boot(fakes()), path, {**body, "model": model})

    assert status == reply.status_code


@pytest.mark.parametrize("direction", ["left", "Left", "right", "Right"])
async def test_truncation_direction_reaches_the_server(boot: Boots, direction: str) -> None:
    servers = fakes()
    body = {"inputs": "a", "truncate": True, "truncation_direction": direction, "normalize": False}
    reply = await posted(boot(servers), "/embed", body)

    assert 200 == reply.status_code
    assert direction.lower() == sent_to(servers["tei-0"])[1]["truncation_direction"].lower()


@pytest.mark.parametrize(
    "field", ["normalize", "truncation_direction", "inputs", "raw_scores", "return_text", "query"]
)
async def test_rejects_null_where_tei_does(boot: Boots, field: str) -> None:
    reranks = field in ("raw_scores", "return_text", "query")
    body = {"query": "q", "texts": ["a"]} if reranks else {"inputs": "a"}
    reply = await posted(boot(fakes()), "/rerank" if reranks else "/embed", {**body, field: None})

    assert (422, "Validation") == (reply.status_code, reply.json()["error_type"])


@pytest.mark.parametrize("field", ["truncate", "prompt_name", "dimensions", "model"])
async def test_accepts_null_where_tei_does(boot: Boots, field: str) -> None:
    reply = await posted(boot(fakes()), "/embed", {"inputs": "a", field: None})

    assert 200 == reply.status_code


async def test_rerank_sorts_ranks_and_keeps_the_callers_indices(boot: Boots) -> None:
    ranks = (await posted(boot(fakes()), "/rerank", {"query": "q", "texts": TEXTS})).json()

    expected = sorted(range(len(TEXTS)), key=lambda i: -score_of("q", TEXTS[i]))
    assert expected == [rank["index"] for rank in ranks]
    assert all({"index", "score"} == rank.keys() for rank in ranks)
    np.testing.assert_allclose(
        [score_of("q", TEXTS[i]) for i in expected], [rank["score"] for rank in ranks], rtol=1e-6
    )


async def test_equal_scores_put_the_higher_index_first(boot: Boots) -> None:
    ranks = [{"index": i, "score": score} for i, score in enumerate([0.5, 0.25, 0.5, 0.25])]
    server = tei_with_hook(respond_with(200, json.dumps(ranks).encode()), model_type=RERANKER)
    reply = await posted(boot({"rerank-0": server}), "/rerank", {"query": "q", "texts": ["a", "b", "c", "d"]})

    assert [2, 0, 3, 1] == [rank["index"] for rank in reply.json()]


async def test_return_text_adds_each_ranks_own_text(boot: Boots) -> None:
    ranks = (
        await posted(boot(fakes()), "/rerank", {"query": "q", "texts": TEXTS, "return_text": True})
    ).json()

    assert len(TEXTS) == len(ranks)
    assert all(TEXTS[rank["index"]] == rank["text"] for rank in ranks)


@pytest.mark.parametrize("raw_scores", [True, False])
async def test_raw_scores_reaches_the_server(boot: Boots, raw_scores: bool) -> None:
    servers = fakes()
    await posted(boot(servers), "/rerank", {"query": "q", "texts": ["a"], "raw_scores": raw_scores})

    assert raw_scores is sent_to(servers["rerank-0"])[1]["raw_scores"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/models/cross/embed", {"inputs": "a"}, 424, "Backend"),
        (
            "/models/cross/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
            424,
            "Backend",
        ),
        ("/models/no-rerank/rerank", {"query": "q", "texts": ["a"]}, 424, "Backend"),
        ("/models/nowhere/embed", {"inputs": "a"}, 404, "NotFound"),
        ("/models/org/nowhere/embed", {"inputs": "a"}, 404, "NotFound"),
        ("/models/org/embed", {"inputs": "a"}, 404, "NotFound"),
        ("/models/BGE/embed", {"inputs": "a"}, 404, "NotFound"),
    ],
)
async def test_refuses_a_model_of_another_kind_or_an_unknown_one(
    boot: Boots, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert (status, kind) == (reply.status_code, reply.json()["error_type"])


async def test_similarity_is_the_cosine_with_each_sentence_in_order(boot: Boots) -> None:
    sentences = [f"text {i}" for i in range(9)]
    reply = await posted(
        boot(fakes()), "/similarity", {"inputs": {"source_sentence": "a", "sentences": sentences}}
    )

    expected = [float(vector_of("a") @ vector_of(sentence)) for sentence in sentences]
    np.testing.assert_allclose(expected, reply.json(), atol=1e-6)


async def test_tokenize_returns_a_list_for_each_input(boot: Boots) -> None:
    texts = ["red", "green", "blue", "cyan", "pink"]
    reply = await posted(boot(fakes()), "/tokenize", {"inputs": texts})

    assert texts == [tokens[1]["text"] for tokens in reply.json()]
    assert {"id", "text", "special", "start", "stop"} == reply.json()[0][0].keys()


async def test_tokenize_passes_its_options_on(boot: Boots) -> None:
    servers = fakes()
    await posted(
        boot(servers), "/tokenize", {"inputs": "a", "add_special_tokens": False, "prompt_name": "query"}
    )

    _, body = sent_to(servers["tei-0"])
    assert (False, "query") == (body["add_special_tokens"], body["prompt_name"])


async def test_info_has_the_facts_that_teis_clients_read_first(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        facts = (await gateway.client.get("/info")).json()

    assert ("fake/model", "bge", 16) == (
        facts["model_id"],
        facts["served_model_name"],
        facts["max_input_length"],
    )
    assert {"embedding": {"pooling": "cls"}} == facts["model_type"]
    # A client may send as much as the gateway takes, whatever a replica takes.
    assert 2048 == facts["max_client_batch_size"]
    assert facts["auto_truncate"] is True


def test_a_classifier_of_one_label_is_a_reranker() -> None:
    both = frozenset({Operation.CLASSIFY, Operation.RERANK})
    capabilities = Capabilities("m", both, labels=("LABEL_0",))

    assert {"reranker"} == tei.model_type(capabilities).keys()


async def test_info_shows_a_reranker_and_a_model_without_truncation(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        cross = (await gateway.client.get("/models/cross/info")).json()
        strict = (await gateway.client.get("/models/strict/info")).json()

    assert ["reranker"] == list(cross["model_type"])
    assert strict["auto_truncate"] is False


@pytest.mark.parametrize("path", ["/health", "/ping", "/", "/models/bge/health", "/models/org/bge/health"])
async def test_health_needs_a_replica_and_no_key(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        del gateway.client.headers["authorization"]
        assert 200 == (await gateway.client.get(path)).status_code

    async with boot({}) as gateway:
        reply = await gateway.client.get(path)
    assert (503, "Unhealthy") == (reply.status_code, reply.json()["error_type"])
    assert 1 <= int(reply.headers["retry-after"])


async def test_health_of_the_only_model_is_that_of_a_reranker(boot: Boots) -> None:
    config = """
upstreams: {reranker: {backend: tei, replicas: ["http://rerank-0"]}}
models: {cross: {upstream: reranker}}
"""
    async with boot({"rerank-0": FakeTei(model_type=RERANKER)}, config) as gateway:
        reply = await gateway.client.get("/health")

    assert 200 == reply.status_code


async def test_health_of_an_unknown_model_is_not_found(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.get("/models/nowhere/health")

    assert (404, "NotFound") == (reply.status_code, reply.json()["error_type"])


POSTS: Sequence[tuple[str, dict[str, Any]]] = [
    ("embed", {"inputs": "a"}),
    ("rerank", {"query": "q", "texts": ["a"]}),
    ("similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ("tokenize", {"inputs": "a"}),
]


@pytest.mark.parametrize("name", ["bge", "org/bge", "org%2Fbge", "org%2fbge"])
@pytest.mark.parametrize(("operation", "body"), POSTS)
async def test_path_selects_the_model(boot: Boots, name: str, operation: str, body: dict[str, Any]) -> None:
    async with boot(fakes()) as gateway:
        by_path = await gateway.post(f"/models/{name}/{operation}", body)
        by_body = await gateway.post(f"/{operation}", {**body, "model": "bge"})

    assert 200 == by_path.status_code
    assert by_body.json() == by_path.json()


@pytest.mark.parametrize("name", ["bge", "org/bge", "org%2Fbge"])
async def test_info_describes_the_model_in_the_path(boot: Boots, name: str) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.get(f"/models/{name}/info")

    assert (200, name.replace("%2F", "/")) == (reply.status_code, reply.json()["served_model_name"])


@pytest.mark.parametrize(("operation", "body"), POSTS)
async def test_body_selects_the_model(boot: Boots, operation: str, body: dict[str, Any]) -> None:
    async with boot(fakes()) as gateway:
        known = await gateway.post(f"/{operation}", {**body, "model": "org/bge"})
        unknown = await gateway.post(f"/{operation}", {**body, "model": "nowhere"})

    assert 200 == known.status_code
    assert (404, "NotFound") == (unknown.status_code, unknown.json()["error_type"])


async def test_path_overrides_the_model_in_the_body(boot: Boots) -> None:
    servers = fakes()
    reply = await posted(boot(servers), "/models/strict/embed", {"inputs": LONG, "model": "bge"})

    assert 422 == reply.status_code
