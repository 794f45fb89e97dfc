"""Pictures in every dialect, over servers that read them and servers that do not."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract.vectors import max_similarity
from backends.http.media import probe_recording
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import Gate, until
from tests.fakes.infinity import FakeInfinity
from tests.fakes.server import logit_of, token_rows
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm
from tests.pictures import encoded, noise

CONFIG = """
upstreams: {one: {backend: BACKEND, replicas: ["http://one"]OPTIONS}}
models: {clip: {upstream: one}}
"""


def picture(seed: int) -> str:
    """Return a small PNG as base64."""
    return base64.b64encode(encoded(noise(9, 7, seed))).decode()


PICTURES = [f"data:image/png;base64,{picture(seed)}" for seed in range(2)]
FIRST, SECOND = PICTURES


def servers() -> dict[str, Any]:
    """Return a server of each kind that reads pictures."""
    return {"infinity": FakeInfinity(images=True), "vllm": FakeVllm(images=True)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer, by which Infinity's tokens are counted."""
    return write_small_files(tmp_path_factory.mktemp("tokenizer"))


def config_of(backend: str, tokenizer: str) -> str:
    options = f", tokenizer: {tokenizer}" if backend == "infinity" else ""
    return CONFIG.replace("BACKEND", backend).replace("OPTIONS", options)


def seen_by(backend: str, source: str) -> str:
    """Return the text of which the fake makes a vector: vLLM's writes messages by its template."""
    return f"user: {source}" if backend == "vllm" and source.startswith("data:") else source


def message(*content: Any) -> dict[str, Any]:
    """Return a body with one message of a user."""
    return {"messages": [{"role": "user", "content": list(content)}]}


def picture_part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def inline(source: str) -> dict[str, Any]:
    """Return a picture as Gemini's part, with the letters of URLs as its client writes them."""
    data = source.partition(",")[2].replace("+", "-").replace("/", "_")
    return {"inlineData": {"mimeType": "image/png", "data": data}}


BODIES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/embeddings", message(picture_part(FIRST)), [FIRST]),
    ("/v1/embeddings", message({"type": "image_url", "image_url": FIRST}), [FIRST]),
    (
        "/v1/embeddings",
        {"input": [{"image": FIRST}, {"text": "a b"}, {"image": SECOND}]},
        [FIRST, "a b", SECOND],
    ),
    ("/v1/embeddings", {"input": ["a b", {"image": FIRST.partition(",")[2]}]}, ["a b", FIRST]),
    ("/v1/embeddings", {"input": [{"bytes": FIRST.partition(",")[2]}, {"url": SECOND}]}, PICTURES),
    ("/v1/embeddings", {"input": {"image": FIRST}, "dimensions": 4}, [FIRST]),
    ("/infinity/embeddings", {"input": PICTURES, "modality": "image"}, PICTURES),
    ("/infinity/embeddings", {"input": FIRST, "modality": "image"}, [FIRST]),
    ("/infinity/embeddings_image", {"input": PICTURES}, PICTURES),
    ("/v2/embed", {"images": PICTURES, "input_type": "image", "embedding_types": ["float"]}, PICTURES),
    ("/v1/embed", {"images": [FIRST], "input_type": "image"}, [FIRST]),
    (
        "/v2/embed",
        {
            "inputs": [{"content": [{"type": "text", "text": "a b"}]}, {"content": [picture_part(SECOND)]}],
            "input_type": "search_document",
            "embedding_types": ["float"],
        },
        ["a b", SECOND],
    ),
    (
        "/v1/multimodalembeddings",
        {
            "inputs": [
                {"content": [{"type": "image_base64", "image_base64": FIRST}]},
                {"content": [{"type": "text", "text": "a b"}]},
            ],
            "input_type": "document",
        },
        [FIRST, "a b"],
    ),
    (
        "/v1/embeddings",
        {"input": [{"content": [{"type": "text", "text": "a b"}]}, {"content": [picture_part(SECOND)]}]},
        ["a b", SECOND],
    ),
    (
        "/v1beta/models/clip:batchEmbedContents",
        {"requests": [{"content": {"parts": [each]}} for each in ({"text": "a b"}, inline(FIRST))]},
        ["a b", FIRST],
    ),
    ("/v1/models/clip:embedContent", {"content": {"parts": [inline(SECOND)]}}, [SECOND]),
]


def vectors_in(body: dict[str, Any]) -> list[list[float]]:
    """Return the vectors of any dialect's reply."""
    if "embedding" in body:
        return [body["embedding"]["values"]]
    if "embeddings" in body and isinstance(body["embeddings"], list) and "values" in body["embeddings"][0]:
        return [item["values"] for item in body["embeddings"]]
    if "data" in body:
        return [item["embedding"] for item in body["data"]]
    found = body["embeddings"]
    return found["float"] if isinstance(found, dict) else found


@pytest.mark.parametrize("backend", ["infinity", "vllm"])
@pytest.mark.parametrize(("path", "body", "sources"), BODIES)
async def test_each_input_gets_its_own_vector(
    boot: Boots, tokenizer: str, backend: str, path: str, body: dict[str, Any], sources: list[str]
) -> None:
    reply = await posted(boot({"one": servers()[backend]}, config_of(backend, tokenizer)), path, body)

    assert 200 == reply.status_code, reply.text
    width = body.get("dimensions", 8)
    expected = np.array([vector_of(seen_by(backend, source))[:width] for source in sources])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(expected, np.array(vectors_in(reply.json())), atol=1e-6)


async def test_vllm_reads_texts_and_pictures_together(boot: Boots) -> None:
    body = message({"type": "text", "text": "a b"}, picture_part(FIRST))
    reply = await posted(boot({"one": FakeVllm(images=True)}, config_of("vllm", "")), "/v1/embeddings", body)

    np.testing.assert_allclose(vector_of(f"user: a b {FIRST}"), vectors_in(reply.json())[0], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [{"content": [{"type": "text", "text": "a b"}, picture_part(FIRST)]}]}),
        ("/v1/models/clip:embedContent", {"content": {"parts": [{"text": "a b"}, inline(FIRST)]}}),
        (
            "/v1beta/models/clip:embedContent",
            {
                "content": {
                    "parts": [
                        {"text": "a b"},
                        {"inline_data": {"mime_type": "image/png", "data": picture(0)}},
                    ]
                }
            },
        ),
    ],
)
async def test_parts_of_one_input_have_one_vector(boot: Boots, path: str, body: dict[str, Any]) -> None:
    reply = await posted(boot({"one": FakeVllm(images=True)}, config_of("vllm", "")), path, body)

    np.testing.assert_allclose([vector_of(f"user: a b {FIRST}")], vectors_in(reply.json()), atol=1e-6)


SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Represent it."}]}
OPEN = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
# As Dify's plugin and vLLM's recipe send one input.
DIFY = {
    "messages": [SYSTEM, *message(picture_part(FIRST), {"type": "text", "text": "a b"})["messages"], OPEN],
    "encoding_format": "float",
    "continue_final_message": True,
    "add_special_tokens": True,
}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_conversations_with_pictures_reach_a_server_as_they_are(boot: Boots, path: str) -> None:
    server = FakeVllm(images=True)
    nemotron = [{"role": role, "content": [picture_part(FIRST)]} for role in ("query", "document")]
    bodies: list[dict[str, Any]] = [
        DIFY,
        {"messages": nemotron[:1], "chat_template_kwargs": {"dialect": "short"}},
        {"messages": nemotron[1:]},
        {"messages": [{"role": "user", "content": "a b", "name": "ann"}, *nemotron[1:]]},
    ]
    async with boot({"one": server}, config_of("vllm", "")) as gateway:
        replies = [await gateway.post(path, {"model": "clip"} | body) for body in bodies]
        sent = [body for _, body in server.requests if "messages" in body][-len(bodies) :]

    assert [200] * 4 == [reply.status_code for reply in replies], replies[0].text
    for body, got in zip(bodies, sent, strict=True):
        assert body["messages"] == got["messages"]
        assert body.get("continue_final_message", False) == got["continue_final_message"]
        assert body.get("add_special_tokens", False) == got.get("add_special_tokens", False)
        assert body.get("chat_template_kwargs") == got.get("chat_template_kwargs")


async def test_several_conversations_have_a_vector_each(boot: Boots) -> None:
    query = {"role": "query", "content": [picture_part(FIRST)]}
    text = {"role": "document", "content": "a b"}
    conversations = [[query], [text], [query], [query | {"role": "document"}]]
    async with boot({"one": FakeVllm(images=True)}, config_of("vllm", "")) as gateway:
        reply = await gateway.post("/v1/embeddings", {"messages": conversations})
        mixed = await gateway.post("/v1/embeddings", {"messages": [[query], text]})

    texts = [f"query: {FIRST}", "document: a b", f"query: {FIRST}", f"document: {FIRST}"]
    np.testing.assert_allclose([vector_of(each) for each in texts], vectors_in(reply.json()), atol=1e-6)
    assert (400, "messages") == (mixed.status_code, mixed.json()["error"]["param"])


async def test_a_server_without_templates_refuses_conversations_with_pictures(
    boot: Boots, tokenizer: str
) -> None:
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        several = await gateway.post("/v1/embeddings", DIFY)
        special = await gateway.post(
            "/v1/embeddings", message(picture_part(FIRST)) | {"add_special_tokens": True}
        )

    assert (400, 400) == (several.status_code, special.status_code)
    assert "one message of the role `user`" in several.text
    assert "`add_special_tokens`" in special.text


async def test_a_document_of_a_text_and_a_picture_is_ranked(boot: Boots) -> None:
    documents = [{"text": "a b", "image": FIRST}, {"image": SECOND}, {"text": "c"}, "d"]
    body = {"query": "q", "documents": documents, "return_documents": True}
    reply = await posted(boot({"one": FakeVllm(images=True)}, config_of("vllm", "")), "/v1/rerank", body)

    texts = [f"user: a b {FIRST}", f"user: {SECOND}", "c", "d"]
    results = {item["index"]: item for item in reply.json()["results"]}
    expected = [float(vector_of("q") @ vector_of(text)) for text in texts]
    np.testing.assert_allclose(expected, [results[i]["relevance_score"] for i in range(4)], atol=1e-6)
    assert [*documents[:3], {"text": "d"}] == [results[i]["document"] for i in range(4)]


def content(*parts: str) -> dict[str, Any]:
    """Return a query or a document with parts in vLLM's form."""
    return {
        "content": [
            picture_part(part) if part.startswith("data:") else {"type": "text", "text": part}
            for part in parts
        ]
    }


# A body, with the text of its query and those of its documents, as the fake's template writes them.
PICTURED: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (
        "/v1/rerank",
        {"query": "q", "documents": [{"image": FIRST}, {"text": "a b"}, {"image": SECOND}, "c"]},
        "q",
        [FIRST, "a b", SECOND, "c"],
    ),
    (
        "/v1/rerank",
        {"query": {"image": FIRST.partition(",")[2]}, "documents": ["a", {"text": "b", "image": SECOND}]},
        FIRST,
        ["a", f"b {SECOND}"],
    ),
    (
        "/v2/rerank",
        {"query": content("q", FIRST), "documents": [content(SECOND, "a b"), "c"]},
        f"q {FIRST}",
        [f"{SECOND} a b", "c"],
    ),
    ("/rerank", {"query": "q", "documents": content(FIRST)}, "q", [FIRST]),
    ("/score", {"text_1": "q", "text_2": [content(FIRST), "a"]}, "q", [FIRST, "a"]),
    ("/v1/score", {"queries": content(FIRST), "items": ["a", content(FIRST)]}, FIRST, ["a", FIRST]),
    (
        "/v1/score/clip",
        {
            "query": {"text": "q"},
            "items": [{"images": [{"data": FIRST.partition(",")[2]}]}, {"text": "a"}],
        },
        "q",
        [FIRST, "a"],
    ),
]


def scores_in(body: dict[str, Any]) -> list[float]:
    """Return the scores of any dialect's reply in the order of the documents."""
    if "scores" in body:
        return [item["score"] for item in sorted(body["scores"], key=lambda item: int(item["item_id"]))]
    found = body.get("results") or body["data"]
    key = "relevance_score" if "results" in body else "score"
    return [item[key] for item in sorted(found, key=lambda item: item["index"])]


@pytest.mark.parametrize(("path", "body", "query", "documents"), PICTURED)
async def test_a_reranker_of_pictures_scores_the_pairs(
    boot: Boots, path: str, body: dict[str, Any], query: str, documents: list[str]
) -> None:
    server = FakeVllm(task="classify", images=True)
    for index, item in enumerate(body.get("items", []) if "/clip" in path else []):
        item["id"] = str(index)
    async with boot({"one": server}, config_of("vllm", "")) as gateway:
        reply = await gateway.post(path, body)
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]

    assert 200 == reply.status_code, reply.text
    expected = [1 / (1 + np.exp(-logit_of(query, document))) for document in documents]
    np.testing.assert_allclose(expected, scores_in(reply.json()), atol=1e-6)
    assert {"rerank", "rerank_image"} <= set(model["operations"])
    assert not {"embed", "embed_image"} & set(model["operations"])


async def test_options_of_a_rerank_reach_a_reranker_of_pictures(boot: Boots) -> None:
    server = FakeVllm(task="classify", images=True, instructed=True)
    body = {"query": "q", "documents": [{"image": FIRST}, {"image": SECOND}]}
    async with boot({"one": server}, config_of("vllm", "")) as gateway:
        raw = await gateway.post("/v1/rerank", body | {"use_activation": False, "instruction": "find"})
        best = await gateway.post("/v2/rerank", body | {"top_n": 1, "return_documents": True})
        cut = await gateway.post("/v1/rerank", body | {"truncate_prompt_tokens": 4})

    expected = [logit_of("find q", source) for source in PICTURES]
    np.testing.assert_allclose(expected, scores_in(raw.json()), atol=1e-6)
    first = int(np.argmax([logit_of("q", source) for source in PICTURES]))
    assert [(first, body["documents"][first])] == [
        (item["index"], item["document"]) for item in best.json()["results"]
    ]
    assert (400, True) == (cut.status_code, "truncate_prompt_tokens" in cut.text)


async def test_pairs_with_pictures_reach_each_upstream_of_a_model(boot: Boots) -> None:
    long, short = (FakeVllm(task="classify", images=True, max_tokens=length) for length in (32, 16))
    config = """
upstreams:
  long: {backend: vllm, replicas: ["http://long"]}
  short: {backend: vllm, replicas: ["http://short"]}
models: {clip: {upstreams: [{name: long}, {name: short}]}}
"""
    async with boot({"long": long, "short": short}, config) as gateway:
        judge = gateway.application.gateway.serving.groups["clip"].judge
        await until(lambda: {"serving"} == {each.standing for each in judge.judgements.values()})
        for _ in range(4):
            reply = await gateway.post("/v1/rerank", {"query": "q", "documents": [{"image": FIRST}]})
            assert 200 == reply.status_code, reply.text
        refused = await gateway.post("/v1/rerank", {"query": "q " * 40, "documents": [{"image": FIRST}]})

    scored = [
        [body for path, body in server.requests if path == "/v1/score" and body["text_1"] == "q"]
        for server in (long, short)
    ]
    assert all(scored)
    assert 4 == sum(map(len, scored))
    assert 400 == refused.status_code


async def test_equal_pairs_are_scored_once_and_counted_each(boot: Boots) -> None:
    tenants = f'tenants: {{t: {{keys: ["{key_digest(KEY)}"], limits: {{images_per_minute: 7}}}}}}\n'
    server = FakeVllm(task="classify", images=True)
    body = {"query": "q", "documents": [{"image": FIRST}, {"image": SECOND}, {"image": FIRST}]}
    async with boot({"one": server}, config_of("vllm", "") + tenants) as gateway:
        before = len(server.requests)
        reply = await gateway.post("/v1/rerank", body)
        sent = [sent for path, sent in server.requests[before:] if path == "/v1/score"]

    scores = scores_in(reply.json())
    assert scores[0] == scores[2] != scores[1]
    assert 2 == len(sent)
    # "q", the separator, and an address, with two special tokens, of each pair.
    assert 2 * 5 == reply.json()["usage"]["total_tokens"]
    assert "4" == reply.headers["x-ratelimit-remaining-images"]


async def test_pairs_with_pictures_are_refused_where_none_scores_them(boot: Boots) -> None:
    body = {"model": "clip", "query": "q", "documents": [{"image": FIRST}]}
    async with boot({"one": FakeVllm(task="classify")}, config_of("vllm", "")) as gateway:
        replies = [
            await gateway.post("/v1/rerank", body),
            await gateway.post("/score", {"model": "clip", "text_1": "q", "text_2": content(FIRST)}),
        ]
        text = await gateway.post("/v1/rerank", {"query": "q", "documents": ["a"]})

    for reply in replies:
        assert 400 == reply.status_code
        assert "does not rank images" in reply.text
    assert 200 == text.status_code


@pytest.mark.parametrize("kind", ["video_url", "input_audio"])
@pytest.mark.parametrize("path", ["/v1/rerank", "/score"])
async def test_other_media_are_not_ranked(boot: Boots, path: str, kind: str) -> None:
    values = {"video_url": {"url": "data:video/mp4;base64,AAAA"}, "input_audio": {"data": "AAAA"}}
    side = {"content": [{"type": kind, kind: values[kind]}]}
    body = {"query": "q", "documents": [side]} if path == "/v1/rerank" else {"text_1": "q", "text_2": side}
    reply = await posted(
        boot({"one": FakeVllm(task="classify", images=True)}, config_of("vllm", "")), path, body
    )

    assert 400 == reply.status_code
    assert ("video_url" if kind == "video_url" else "is sound") in reply.text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a", FIRST]}, "document 1"),
        ("/score", {"text_1": "q", "text_2": ["a", FIRST]}, "text 2 of pair 1"),
        ("/score", {"text_1": ["q", FIRST], "text_2": ["a", "b"]}, "text 1 of pair 1"),
        ("/v1/score/clip", {"query": {"text": "q"}, "items": [{"text": FIRST}]}, "document 0"),
    ],
)
async def test_a_picture_as_a_text_is_refused_by_a_reranker_of_pictures(
    boot: Boots, path: str, body: dict[str, Any], named: str
) -> None:
    server = FakeVllm(task="classify", images=True)
    reply = await posted(boot({"one": server}, config_of("vllm", "")), path, body)

    assert 400 == reply.status_code
    assert f"{named} is a picture or a recording in the place of a text" in reply.text


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (picture_part(FIRST) | {"text": "a caption"}, "type 'image_url' with `text`"),
        (picture_part(FIRST) | {"type": "text", "text": "a"}, "type 'text' with `image_url`"),
        (picture_part(FIRST) | {"text": "", "audio_url": None}, None),
    ],
)
async def test_a_part_has_the_content_of_its_type_only(
    boot: Boots, part: dict[str, Any], named: str | None
) -> None:
    for server, path, body in (
        (FakeVllm(images=True), "/v1/embeddings", message(part)),
        (FakeVllm(task="classify", images=True), "/score", {"text_1": "q", "text_2": {"content": [part]}}),
    ):
        reply = await posted(boot({"one": server}, config_of("vllm", "")), path, body)
        assert (200 if named is None else 400) == reply.status_code
        assert named is None or named in reply.text


async def test_a_part_of_voyages_has_the_content_of_its_type_only(boot: Boots) -> None:
    part = {"type": "text", "text": "a caption", "image_base64": FIRST}
    body = {"inputs": [{"content": [part]}]}
    reply = await posted(
        boot({"one": FakeVllm(images=True)}, config_of("vllm", "")), "/v1/multimodalembeddings", body
    )

    assert (400, True) == (reply.status_code, "type 'text' with `image_base64`" in reply.text)


async def test_a_damaged_picture_of_a_pair_is_named(boot: Boots) -> None:
    server = FakeVllm(task="classify", images=True)

    async def refuse(_: str, sent: Any) -> tuple[int, bytes] | None:
        error = {"message": "cannot identify image", "type": "BadRequestError", "code": 400}
        return (400, json.dumps({"error": error}).encode()) if SECOND in json.dumps(sent) else None

    async with boot({"one": server}, config_of("vllm", "")) as gateway:
        server.hook = refuse
        documents = [{"image": FIRST}, {"image": FIRST}, {"image": SECOND}]
        reply = await gateway.post("/v1/rerank", {"query": "q", "documents": documents})

    assert 400 == reply.status_code, reply.text
    assert "input 2: " in reply.text


async def test_usage_of_voyage_counts_pixels(boot: Boots, tokenizer: str) -> None:
    body = {
        "inputs": [{"content": [{"type": "image_base64", "image_base64": source}]} for source in PICTURES]
    }
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        reply = await gateway.post("/v1/multimodalembeddings", body | {"output_encoding": "base64"})

    usage = {"text_tokens": 0, "image_pixels": 126, "video_pixels": 0, "total_tokens": 2}
    assert usage == reply.json()["usage"]
    packed = [base64.b64decode(item["embedding"]) for item in reply.json()["data"]]
    np.testing.assert_allclose(
        [vector_of(source) for source in PICTURES], [np.frombuffer(row, "<f4") for row in packed], atol=1e-6
    )


async def test_voyage_returns_the_type_that_is_asked_for(boot: Boots, tokenizer: str) -> None:
    body = {"inputs": [{"content": [{"type": "image_base64", "image_base64": FIRST}]}]}
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        plain = await gateway.post("/v1/multimodalembeddings", body | {"output_dtype": None})
        bits = await gateway.post("/v1/multimodalembeddings", body | {"output_dtype": "ubinary"})
        packed = await gateway.post(
            "/v1/multimodalembeddings", body | {"output_dtype": "ubinary", "output_encoding": "base64"}
        )

    (vector,), (octets,) = vectors_in(plain.json()), vectors_in(bits.json())
    assert list(np.packbits(np.array(vector) > 0)) == octets
    assert bytes(octets) == base64.b64decode(vectors_in(packed.json())[0])


async def test_the_first_name_of_jinas_types_is_applied(boot: Boots, tokenizer: str) -> None:
    body = {"input": [{"bytes": FIRST.partition(",")[2]}], "encoding_type": "ubinary"}
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        reply = await gateway.post("/v1/embeddings", body)
        both = await gateway.post("/v1/embeddings", body | {"embedding_type": "float"})

    assert list(np.packbits(vector_of(FIRST) > 0)) == vectors_in(reply.json())[0]
    assert (400, "encoding_type") == (both.status_code, both.json()["error"]["param"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", message(picture_part("https://example.org/a.png")), "not fetched"),
        ("/v1/embeddings", message(picture_part("data:image/png;base64,AAAA")), "damaged"),
        ("/v1/embeddings", message(picture_part(FIRST)) | {"input": "a"}, "one of them"),
        ("/v1/embeddings", {"messages": [message(picture_part(FIRST))["messages"], []]}, "without messages"),
        (
            "/v1/embeddings",
            message({"type": "input_audio", "text": None}, picture_part(FIRST)),
            "input_audio",
        ),
        ("/v1/embeddings", message(picture_part(FIRST), {"type": "text", "text": ""}), "empty text"),
        ("/v1/embeddings", {"input": [{"image": FIRST, "text": "a"}]}, "one text or one image"),
        ("/v1/embeddings", {"input": [{"content": [], "image": FIRST}]}, "one text or one image"),
        ("/v1/embeddings", {"input": [{"content": []}]}, "alone"),
        (
            "/v1/embeddings",
            {"input": [{"content": [picture_part(FIRST), {"type": "input_video"}]}]},
            "input_video",
        ),
        ("/v1/embeddings", {"input": [{"bytes": FIRST, "text": "a"}]}, "one text or one image"),
        ("/v1/embeddings", {"input": [{"image": FIRST}], "late_chunking": True}, "late_chunking"),
        ("/v1/embeddings", {"input": [{"image": FIRST}, [1, 2]]}, "token ids"),
        ("/v1/embeddings", message(picture_part(FIRST)) | {"input_type": "query"}, "input_type"),
        ("/v1/embeddings", message(picture_part(FIRST)) | {"task": "retrieval.query"}, "task"),
        ("/v1/embeddings", {"input": [{"image": FIRST}, "a"], "input_type": "no-such"}, "no-such"),
        ("/infinity/embeddings", {"input": ["x"], "modality": "audio"}, "base64"),
        ("/v2/embed", {"images": [FIRST], "texts": ["a"], "input_type": "image"}, "one of them"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "needs `images`"),
        ("/v2/embed", {"images": [], "input_type": "image"}, "empty list"),
        ("/v1/multimodalembeddings", {"inputs": [{"content": []}]}, "empty"),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "video_url"}]}]}, "video_url"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    boot: Boots, path: str, body: dict[str, Any], named: str
) -> None:
    reply = await posted(boot({"one": FakeVllm(images=True)}, config_of("vllm", "")), path, body)

    assert reply.status_code in {400, 422}, reply.text
    assert named in reply.text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"input": ["a", FIRST]}, "input 1"),
        ("/v1/embeddings", {"input": "data:audio/wav;base64,UklG"}, "input 0"),
        ("/embed", {"inputs": FIRST}, "input 0"),
        ("/infinity/embeddings", {"input": [FIRST]}, "input 0"),
        ("/v1/rerank", {"query": FIRST, "documents": ["a"]}, "the query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", FIRST]}, "document 1"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [FIRST]}}, "input 1"),
    ],
)
async def test_a_picture_as_a_text_is_refused_by_a_model_of_pictures(
    boot: Boots, tokenizer: str, path: str, body: dict[str, Any], named: str
) -> None:
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        reply = await gateway.post(path, body)
    async with boot({"one": FakeTei()}, config_of("tei", "")) as gateway:
        as_text = await gateway.post(path, body)

    assert reply.status_code in {400, 413, 422}, reply.text
    assert f"{named} is a picture or a recording in the place of a text" in reply.text
    assert 200 == as_text.status_code, as_text.text


@pytest.mark.parametrize("empty", [[], "", None])
async def test_no_inputs_next_to_messages_are_ignored(boot: Boots, empty: object) -> None:
    async with boot({"one": FakeVllm(images=True)}, config_of("vllm", "")) as gateway:
        reply = await gateway.post("/v1/embeddings", message(picture_part(FIRST)) | {"input": empty})
        text = {"messages": [{"role": "user", "content": "a b"}], "input": empty}
        of_text = await gateway.post("/v1/embeddings", text)
        missing = await gateway.post("/v1/embeddings", {"input": None})

    assert [200, 200, 400] == [found.status_code for found in (reply, of_text, missing)], of_text.text
    assert "`input` is missing" in missing.text


async def test_pictures_are_reserved_by_their_size_and_settled_by_the_reply(
    boot: Boots, tokenizer: str
) -> None:
    tenants = f'tenants: {{t: {{keys: ["{key_digest(KEY)}"], limits: {{tokens_per_minute: 300}}}}}}\n'
    config = config_of("infinity", tokenizer) + tenants
    async with boot({"one": FakeInfinity(images=True)}, config) as gateway:
        first = await gateway.post("/v1/embeddings", {"input": [{"image": FIRST}]})
        both = await gateway.post("/v1/embeddings", {"input": [{"image": FIRST}, {"image": SECOND}]})

    assert 200 == first.status_code, first.text
    assert "299" == first.headers["x-ratelimit-remaining-tokens"]
    assert 400 == both.status_code
    assert "tokens" in both.json()["error"]["message"]


SOUNDS = [
    f"data:audio/wav;base64,{base64.b64encode(probe_recording().data + bytes(2 * extra)).decode()}"
    for extra in range(2)
]
SOUND = SOUNDS[0]
SOUND_BODIES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/embeddings", message({"type": "audio_url", "audio_url": {"url": SOUND}}), [SOUND]),
    ("/v1/embeddings", message({"type": "audio_url", "audio_url": SOUND}), [SOUND]),
    (
        "/v1/embeddings",
        message({"type": "input_audio", "input_audio": {"data": SOUND.partition(",")[2], "format": "wav"}}),
        [SOUND],
    ),
    ("/v1/embeddings", {"input": [{"audio": SOUND}, "a b", {"audio": SOUNDS[1]}]}, [SOUND, "a b", SOUNDS[1]]),
    ("/infinity/embeddings", {"input": SOUNDS, "modality": "audio"}, SOUNDS),
    ("/infinity/embeddings_audio", {"input": SOUND}, [SOUND]),
]


@pytest.mark.parametrize("backend", ["infinity", "vllm"])
@pytest.mark.parametrize(("path", "body", "sources"), SOUND_BODIES)
async def test_each_recording_gets_its_own_vector(
    boot: Boots, tokenizer: str, backend: str, path: str, body: dict[str, Any], sources: list[str]
) -> None:
    server: Any = FakeInfinity(sound=True) if backend == "infinity" else FakeVllm(sound=True)
    async with boot({"one": server}, config_of(backend, tokenizer)) as gateway:
        reply = await gateway.post(path, body)
        models = (await gateway.client.get("/infinity/models")).json()["data"]

    assert 200 == reply.status_code, reply.text
    np.testing.assert_allclose(
        [vector_of(seen_by(backend, source)) for source in sources], vectors_in(reply.json()), atol=1e-6
    )
    assert {"embed", "audio_embed"} <= set(models[0]["capabilities"])
    assert "image_embed" not in models[0]["capabilities"]


@pytest.mark.parametrize(
    ("backend", "make"), [("infinity", FakeInfinity), ("vllm", FakeVllm), ("tei", FakeTei)]
)
@pytest.mark.parametrize(
    ("medium", "path", "body"),
    [
        *(("images", path, body) for path, body, _ in BODIES),
        *(("sound", path, body) for path, body, _ in SOUND_BODIES),
    ],
)
async def test_a_model_without_a_medium_refuses_it(
    boot: Boots, tokenizer: str, backend: str, make: Any, medium: str, path: str, body: dict[str, Any]
) -> None:
    server = make(images=True) if medium == "sound" and backend != "tei" else make()
    reply = await posted(boot({"one": server}, config_of(backend, tokenizer)), path, body)

    assert reply.status_code in {400, 422}, reply.text
    assert f"embed {medium}" in reply.text


async def test_a_model_of_one_medium_refuses_the_other(boot: Boots, tokenizer: str) -> None:
    body = {"input": [{"image": FIRST}, {"audio": SOUND}]}
    for server in (FakeInfinity(sound=True), FakeVllm(sound=True)):
        backend = "infinity" if isinstance(server, FakeInfinity) else "vllm"
        async with boot({"one": server}, config_of(backend, tokenizer)) as gateway:
            reply = await gateway.post("/v1/embeddings", body)

        assert 400 == reply.status_code
        assert "does not embed_image" in reply.text


@pytest.mark.parametrize("backend", ["infinity", "vllm"])
async def test_equal_pictures_are_computed_once(boot: Boots, tokenizer: str, backend: str) -> None:
    server = servers()[backend]
    async with boot({"one": server}, config_of(backend, tokenizer)) as gateway:
        body = {"input": [{"image": source} for source in (FIRST, SECOND, FIRST, FIRST)]}
        server.requests.clear()
        reply = await gateway.post("/v1/embeddings", body)
        sent = sum(str(seen).count("data:image") for seen in server.requests)

    vectors = vectors_in(reply.json())
    assert 2 == sent
    assert [vectors[0], vectors[1], vectors[0], vectors[0]] == vectors
    assert vectors[0] != vectors[1]


LIMITED = f'tenants: {{t: {{keys: ["{key_digest(KEY)}"], limits: {{images_per_day: 3}}}}}}\n'


async def test_a_limit_counts_every_picture(boot: Boots, tokenizer: str) -> None:
    config = config_of("infinity", tokenizer) + LIMITED
    pair = {"input": [{"image": FIRST}, {"image": FIRST}]}
    async with boot({"one": servers()["infinity"]}, config) as gateway:
        first = await gateway.post("/v1/embeddings", pair)
        text = await gateway.post("/v1/embeddings", {"input": ["a", "b", "c", "d"]})
        refused = await gateway.post("/v1/embeddings", pair)
        last = await gateway.post("/v1/embeddings", {"input": {"image": SECOND}})
        never = await gateway.post("/v1/embeddings", {"input": [{"image": FIRST}] * 4})

    assert [200, 200, 429, 200, 400] == [reply.status_code for reply in (first, text, refused, last, never)]
    assert ["1", "0"] == [reply.headers["x-ratelimit-remaining-images"] for reply in (first, last)]
    assert "images_per_day (3): 1 is left, and this call costs 2 images" in refused.text
    assert "this call costs 4 images, and images_per_day is 3" in never.text


async def test_vllm_gives_a_vector_for_each_token_of_a_picture(boot: Boots) -> None:
    late = FakeVllm(task="token_embed", images=True, max_tokens=64)
    asked = message(picture_part(FIRST))
    contents = [{"content": [picture_part(source)]} for source in PICTURES]
    async with boot({"one": late}, config_of("vllm", "")) as gateway:
        pooled = await gateway.post("/pooling", asked)
        embedded = await gateway.post("/v1/embeddings", asked | {"return_multivector": True})
        mixed = await gateway.post(
            "/v1/embeddings", {"input": ["a b", {"image": SECOND}], "return_multivector": True}
        )
        scores = await gateway.post("/score", {"text_1": "a b", "text_2": contents})
        cut = await gateway.post(
            "/v1/embeddings", {"input": [{"image": FIRST}], "return_multivector": True, "dimensions": 4}
        )
        raw = await gateway.post("/pooling", asked | {"use_activation": False})
        page = {"input": [FIRST], "modality": "image", "model": "clip"}
        infinity = await gateway.post("/infinity/embeddings", page)
        narrow = await gateway.post("/infinity/embeddings", page | {"dimensions": 4})

    rows = [token_rows(f"user: {source}") for source in PICTURES]
    assert 200 == pooled.status_code, pooled.text
    np.testing.assert_allclose(rows[0], pooled.json()["data"][0]["data"], atol=1e-6)
    np.testing.assert_allclose(rows[0], embedded.json()["data"][0]["embeddings"], atol=1e-6)
    np.testing.assert_allclose(rows[0], infinity.json()["data"][0]["embedding"], atol=1e-6)
    assert {4} == {len(row) for row in narrow.json()["data"][0]["embedding"]}
    found = [item["embeddings"] for item in mixed.json()["data"]]
    np.testing.assert_allclose(token_rows("a b"), found[0], atol=1e-6)
    np.testing.assert_allclose(rows[1], found[1], atol=1e-6)
    query = token_rows("a b")
    expected = [max_similarity(query, [row])[0] / len(query) for row in rows]
    np.testing.assert_allclose(expected, [item["score"] for item in scores.json()["data"]], atol=1e-5)
    assert 400 == cut.status_code == raw.status_code
    assert "`dimensions`" in cut.text
    assert "use_activation" in raw.text


async def test_pooling_embeds_pictures_and_refuses_to_classify_them(boot: Boots) -> None:
    asked = message(picture_part(FIRST))
    async with boot({"one": FakeVllm(images=True, sound=True)}, config_of("vllm", "")) as gateway:
        reply = await gateway.post("/pooling", asked | {"encoding_format": "base64"})
        heard = await gateway.post("/pooling", message({"type": "audio_url", "audio_url": SOUND}))
        raw = await gateway.post("/pooling", asked | {"use_activation": False})
        classes = await gateway.post("/pooling", asked | {"task": "classify"})
        both = await gateway.post("/pooling", asked | {"input": "a"})

    packed = base64.b64decode(reply.json()["data"][0]["data"])
    np.testing.assert_allclose(vector_of(f"user: {FIRST}"), np.frombuffer(packed, "<f4"), atol=1e-6)
    np.testing.assert_allclose(2 * vector_of(f"user: {FIRST}"), raw.json()["data"][0]["data"], atol=1e-5)
    np.testing.assert_allclose(vector_of(f"user: {SOUND}"), heard.json()["data"][0]["data"], atol=1e-6)
    assert "not classified" in classes.text
    assert "one of them" in both.text


async def test_a_text_next_to_a_picture_has_the_prompt_that_it_has_alone(boot: Boots, tmp_path: Path) -> None:
    tokenizer = write_small_files(tmp_path)
    settings = {"prompts": {"query": "find: ", "passage": "text: "}, "default_prompt_name": "passage"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        for task, prompt in ((None, "text: "), ("retrieval.query", "find: ")):
            mixed = await gateway.post("/v1/embeddings", {"input": ["a b", {"image": FIRST}], "task": task})
            alone = await gateway.post("/v1/embeddings", {"input": "a b", "task": task})

            found = vectors_in(mixed.json())
            np.testing.assert_allclose(vector_of(f"{prompt}a b"), found[0], atol=1e-6)
            np.testing.assert_allclose(vectors_in(alone.json())[0], found[0], atol=1e-6)
            np.testing.assert_allclose(vector_of(FIRST), found[1], atol=1e-6)


@pytest.mark.parametrize(
    "field", [{"chat_template_kwargs": {"a": "b"}}, {"add_generation_prompt": True}, {"chat_template": "x"}]
)
async def test_servers_without_a_chat_template_refuse_its_fields(
    boot: Boots, tokenizer: str, field: dict[str, Any]
) -> None:
    async with boot({"one": FakeInfinity(images=True)}, config_of("infinity", tokenizer)) as gateway:
        reply = await gateway.post("/v1/embeddings", message(picture_part(FIRST)) | field)

    assert 400 == reply.status_code, reply.text
    assert "applies no chat template" in reply.text


async def test_texts_do_not_wait_for_pictures(boot: Boots, tokenizer: str) -> None:
    server, gate = FakeVllm(images=True), Gate()

    async def hold_pictures(path: str, sent: dict[str, Any]) -> None:
        if path == "/v1/embeddings" and "data:image" in str(sent):
            await gate()

    config = config_of("vllm", tokenizer).replace("]}}", "], in_flight_batches: 2}}")
    async with boot({"one": server}, config) as gateway:
        server.hook = hold_pictures
        bodies = [message(picture_part(f"data:image/png;base64,{picture(seed)}")) for seed in range(9)]
        flood = [asyncio.create_task(gateway.post("/v1/embeddings", body)) for body in bodies]
        await until(lambda: gate.waiting == 2)
        texts = await asyncio.wait_for(
            asyncio.gather(*(gateway.post("/v1/embeddings", {"input": f"a {n}"}) for n in range(5))), 20
        )
        most = gate.waiting
        gate.opened.set()
        pictures = await asyncio.gather(*flood)

    assert {200} == {reply.status_code for reply in (*texts, *pictures)}
    assert 2 == most
