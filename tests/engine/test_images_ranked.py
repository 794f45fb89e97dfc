"""Rerank of images in every dialect, by models of pages and by models of one vector for each image."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.contract import EmbedParts, EncodeReply, Output
from backends.contract.vectors import max_similarity
from backends.http.media import probe_recording
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Running, running_gateway
from tests.engine.dual_checkpoints import make_dual
from tests.engine.engines import EngineInProcess, engine_on, load_tiny, run_work
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.pages import FAMILIES

pytest.importorskip("PIL", reason="pictures need the extra `media`")

from tests.pictures import encoded, noise, part_of

CONFIG = """
upstreams:
  pages: {backend: torch, model: pages, dtype: float32}
  clip: {backend: torch, model: clip, dtype: float32}
models: {pages: {upstream: pages}, clip: {upstream: clip}, unranked: {upstream: clip, rerank: off}}
"""
DATA = [encoded(noise(90 - 9 * seed, 60 + seed, seed)) for seed in range(3)]
URIS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in DATA]
QUERY = "what is the sum?"
SILENCE = base64.b64encode(probe_recording().data).decode()
IMAGE = base64.b64encode(DATA[0]).decode()
IMAGES = [{"image": uri} for uri in URIS]
CONTENTS = [{"content": [{"type": "image_url", "image_url": {"url": uri}}]} for uri in URIS]


@pytest.fixture(scope="module")
def folders(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a small ColQwen2 and a small CLIP."""
    folder = tmp_path_factory.mktemp("ranked")
    (family,) = [family for family in FAMILIES if family.name == "colqwen2"]
    pages = write_checkpoint(family, folder / "pages")
    make_dual("clip", minilm, folder / "clip")
    return {"pages": pages, "clip": folder / "clip"}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, EngineInProcess]:
    return {name: EngineInProcess(load_tiny(folder)) for name, folder in folders.items()}


@pytest.fixture
async def gateway(engines: dict[str, EngineInProcess]) -> AsyncIterator[Running]:
    """Boot a gateway before both engines."""
    async with running_gateway({}, CONFIG, engines=dict(engines)) as running:
        yield running


@pytest.fixture(scope="module")
def page_scores(folders: dict[str, Path]) -> Any:
    """Return the sums of MaxSim between the query and each page, and the query's tokens."""
    inputs = ((QUERY,), *((part_of(data),) for data in DATA))
    work = EmbedParts(inputs, Output.MULTIVECTOR)
    found = asyncio.run(run_work(engine_on(load_tiny(folders["pages"])), work, EncodeReply)).multivector
    assert found is not None
    query, *pages = found
    return max_similarity(query, pages), len(query)


async def ok(gateway: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await gateway.post(path, body)
    assert 200 == reply.status_code, reply.text
    return dict(reply.json())


def in_order(body: dict[str, Any]) -> list[float]:
    """Return the scores of a rerank in the order of the documents."""
    ranked = [result["relevance_score"] for result in body["results"]]
    assert sorted(ranked, reverse=True) == ranked
    return [
        result["relevance_score"] for result in sorted(body["results"], key=lambda result: result["index"])
    ]


@pytest.mark.parametrize("documents", [IMAGES, CONTENTS], ids=["Jina", "vLLM"])
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_pages_are_ranked_by_late_interaction(
    gateway: Running, page_scores: Any, path: str, documents: list[Any]
) -> None:
    sums, count = page_scores
    query: Any = QUERY if documents is IMAGES else {"content": [{"type": "text", "text": QUERY}]}
    body = {"model": "pages", "query": query, "documents": documents}
    found = await ok(gateway, path, body)

    np.testing.assert_allclose(in_order(found), sums / count, rtol=1e-4)
    # Images are not sent back; OpenRouter's client requires the field at its path.
    assert {"/v2/rerank": None}.get(path, {}) == found["results"][0].get("document")
    raw = await ok(gateway, path, body | {"use_activation": False, "top_n": 1, "return_documents": True})
    assert 1 == len(raw["results"])
    assert raw["results"][0]["relevance_score"] == pytest.approx(sums.max(), rel=1e-4)
    shown = documents[int(sums.argmax())]
    assert raw["results"][0]["document"] == (shown if documents is IMAGES else {"multi_modal": shown})


async def test_scores_of_vllm_are_those_of_the_rerank(gateway: Running, page_scores: Any) -> None:
    sums, count = page_scores
    one = await ok(gateway, "/score", {"model": "pages", "text_1": QUERY, "text_2": CONTENTS})
    pairs = await ok(gateway, "/score", {"model": "pages", "queries": CONTENTS, "items": CONTENTS[::-1]})
    raw = {"model": "pages", "data_1": [QUERY], "data_2": CONTENTS[:1], "use_activation": False}

    np.testing.assert_allclose([item["score"] for item in one["data"]], sums / count, rtol=1e-4)
    first, middle, last = (item["score"] for item in pairs["data"])
    # A page is its own best match: each of its vectors meets itself.
    assert middle == pytest.approx(1, abs=1e-3)
    assert max(first, last) < 1
    assert (await ok(gateway, "/v1/score", raw))["data"][0]["score"] == pytest.approx(sums[0], rel=1e-4)


async def test_models_of_one_vector_rank_by_cosine(gateway: Running) -> None:
    inputs = [{"text": QUERY}, *IMAGES, {"text": "a dog"}]
    embedded = await ok(gateway, "/v1/embeddings", {"model": "clip", "input": inputs})
    query, *documents = np.array([item["embedding"] for item in embedded["data"]])
    body = {"model": "clip", "query": QUERY, "documents": [*IMAGES, "a dog"]}

    np.testing.assert_allclose(in_order(await ok(gateway, "/v1/rerank", body)), documents @ query, atol=1e-5)
    by_image = await ok(gateway, "/v1/rerank", body | {"query": IMAGES[0]})
    np.testing.assert_allclose(in_order(by_image), documents @ documents[0], atol=1e-5)


async def sie(gateway: Running, path: str, body: dict[str, Any], *, packed: bool = False) -> Any:
    """Return the reply of SIE to a body, sent in JSON or msgpack."""
    if not packed:
        return await ok(gateway, path, body)
    headers = {"content-type": "application/msgpack", "accept": "application/json"}
    reply = await gateway.client.post(path, content=msgspec.msgpack.encode(body), headers=headers)
    assert 200 == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize("packed", [False, True], ids=["JSON", "msgpack"])
async def test_items_of_sie_have_images(gateway: Running, page_scores: Any, packed: bool) -> None:
    items = [
        {"id": str(index), "images": [{"data": data if packed else base64.b64encode(data).decode()}]}
        for index, data in enumerate(DATA)
    ]
    sums, count = page_scores
    late = {"output_types": ["multivector"], "options": {"is_query": False}}
    pages = await sie(gateway, "/v1/encode/pages", {"items": items, "params": late}, packed=packed)
    query = await sie(gateway, "/v1/encode/pages", {"items": [{"text": QUERY}], "params": late})
    dense = await sie(gateway, "/v1/encode/clip", {"items": [*items, {"text": "a dog"}]}, packed=packed)
    plain = await ok(gateway, "/v1/embeddings", {"model": "clip", "input": [*IMAGES, "a dog"]})
    scores = await sie(gateway, "/v1/score/pages", {"query": {"text": QUERY}, "items": items}, packed=packed)

    vectors = [np.array(item["multivector"]["values"]) for item in (*query["items"], *pages["items"])]
    np.testing.assert_allclose(max_similarity(vectors[0], vectors[1:]), sums, rtol=1e-4)
    np.testing.assert_allclose(
        [item["dense"]["values"] for item in dense["items"]],
        [item["embedding"] for item in plain["data"]],
        atol=1e-5,
    )
    found = {item["item_id"]: item["score"] for item in scores["scores"]}
    np.testing.assert_allclose([found[str(index)] for index in range(3)], sums / count, rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("encode/clip", {"items": [{"images": [{"data": "AAAA"}]}]}, "the picture of `items` 0"),
        ("encode/clip", {"items": [{"images": [{"data": "?"}]}]}, "images"),
        ("encode/clip", {"items": [{"audio": {"data": "AAAA"}}]}, "the recording of `items` 0"),
        ("encode/clip", {"items": [{"audio": {"data": SILENCE}}]}, "does not embed sound"),
        ("encode/clip", {"items": [{"images": [{"data": IMAGE}]}, {}]}, "`items` 1 has no"),
        ("encode/clip", {"items": [{"images": [{"data": IMAGE}], "text": "a"}]}, "2 parts"),
        ("encode/clip", {"items": [{"images": [{"data": IMAGE}], "video": {}}]}, "`video`"),
        (
            "encode/clip",
            {"items": [{"images": [{"data": IMAGE}]}], "params": {"output_types": ["dense", "multivector"]}},
            "one of them",
        ),
        (
            "encode/pages",
            {
                "items": [{"images": [{"data": IMAGE}]}],
                "params": {"output_types": ["multivector"], "options": {"normalize": False}},
            },
            "`normalize`",
        ),
        ("score/clip", {"query": {"audio": {"data": "AAAA"}}, "items": [{"text": "a"}]}, "is sound"),
        ("score/unranked", {"query": {"images": [{"data": IMAGE}]}, "items": [{"text": "a"}]}, "rank images"),
    ],
)
async def test_items_of_sie_are_refused_by_name(
    gateway: Running, path: str, body: dict[str, Any], reason: str
) -> None:
    reply = await gateway.post(f"/v1/{path}", body)

    assert 400 == reply.status_code, reply.text
    assert reason in reply.json()["detail"]["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"model": "unranked"}, "does not rank images"),
        ({"model": "pages", "documents": [*IMAGES, "a text"]}, "document 3 has a text"),
        ({"documents": [*IMAGES, {"image": URIS[0][:200] + "%"}]}, "`documents` 3"),
        ({"query": {"image": "x y"}}, "`query` 0"),
        ({"documents": [{"image": "https://example.org/a.png"}]}, "not fetched"),
        ({"documents": [{"image": URIS[0], "text": "a"}]}, "one text or one picture"),
        ({"documents": [{"content": []}, *IMAGES]}, "is empty"),
        (
            {"documents": [{"content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}]},
            "is sound",
        ),
        ({"query": "", "documents": IMAGES}, "empty text"),
        ({"max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ({"max_doc_length": 9}, "max_doc_length"),
        ({"instruction": "rank"}, "instruction"),
        ({"rank_fields": ["a"]}, "rank_fields"),
        ({"documents": CONTENTS, "query": {"content": [{"type": "video_url"}]}}, "video_url"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(
    gateway: Running, body: dict[str, Any], reason: str
) -> None:
    sent = {"model": "clip", "query": QUERY, "documents": IMAGES} | body
    reply = await gateway.post("/v1/rerank", sent)

    assert reply.status_code in {400, 422}, reply.text
    assert reason in reply.text


@pytest.mark.parametrize("asked", [True, False])
async def test_data_has_images_as_they_were_sent(gateway: Running, asked: bool) -> None:
    documents = [*IMAGES, "a text"]
    sent = {"model": "clip", "query": QUERY, "documents": documents, "top_k": 4, "return_documents": asked}
    reply = await ok(gateway, "/v1/rerank", sent)

    assert [item["index"] for item in reply["results"]] == [item["index"] for item in reply["data"]]
    for item in reply["data"]:
        assert item.get("document") == (documents[item["index"]] if asked else None)


async def test_an_image_that_the_engine_cannot_read_is_named(gateway: Running) -> None:
    cut = {"image": base64.b64encode(DATA[1][:-60]).decode()}
    sent = {"model": "clip", "query": QUERY, "documents": [IMAGES[0], cut]}
    reply = await gateway.post("/v1/rerank", sent)
    as_query = await gateway.post("/v1/rerank", sent | {"query": cut, "documents": IMAGES})

    assert 400 == reply.status_code == as_query.status_code
    assert "input 1: " in reply.text
    assert "the query: " in as_query.text


async def test_a_model_lists_the_operation(gateway: Running) -> None:
    models = {model["id"]: model for model in (await gateway.client.get("/v1/models")).json()["data"]}

    assert "rerank_image" in models["pages"]["operations"]
    assert "rerank_image" in models["clip"]["operations"]
    assert "rerank_image" not in models["unranked"]["operations"]
    of_sie = {
        model["name"]: model["inputs"] for model in (await gateway.client.get("/v1/models")).json()["models"]
    }
    assert {"pages": ["text", "image"], "clip": ["text", "image"], "unranked": ["text", "image"]} == of_sie


async def test_images_count_towards_their_limit(engines: dict[str, EngineInProcess]) -> None:
    tenants = f'tenants: {{t: {{keys: ["{key_digest(KEY)}"], limits: {{images_per_minute: 7}}}}}}\n'
    async with running_gateway({}, CONFIG + tenants, engines=dict(engines)) as gateway:
        body = {"model": "pages", "query": IMAGES[0], "documents": [IMAGES[0], IMAGES[1], IMAGES[1]]}
        first = await gateway.post("/v1/rerank", body)
        second = await gateway.post("/v1/rerank", body)

    assert "3" == first.headers["x-ratelimit-remaining-images"], dict(first.headers)
    equal = in_order(first.json())
    assert equal[0] == pytest.approx(1, abs=1e-3)
    assert equal[1] == equal[2] < 1
    assert 429 == second.status_code
