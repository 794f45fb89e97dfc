"""Gemini's embedContent and batchEmbedContents, and its list of models."""

from typing import Any

import numpy as np
import pytest

from gateway.api.dialects.gemini.dialect import METHODS
from tests.conftest import CONFIG, KEY, Boots, posted
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import vector_of

TEXTS = ["red", "green and blue"]
PROMPTED = CONFIG.replace(
    "bge: {upstream: embedder}", "bge: {upstream: embedder, prompts: {query: 'q: ', document: 'd: '}}"
)


def request(text: str, **options: Any) -> dict[str, Any]:
    """Return one request of a batch."""
    return {"content": {"parts": [{"text": text}], "role": "user"}} | options


@pytest.mark.parametrize("base", ["v1/models", "v1beta/models", "v1beta"])
@pytest.mark.parametrize("model", ["bge", "org/bge"])
async def test_a_batch_returns_one_vector_for_each_request(boot: Boots, base: str, model: str) -> None:
    body = {"requests": [request(text, model=f"models/{model}") for text in TEXTS]}
    async with boot(fakes()) as gateway:
        reply = await gateway.post(
            f"/{base}/{model}:batchEmbedContents", body, authorization="", x_goog_api_key=KEY
        )

    vectors = [item["values"] for item in reply.json()["embeddings"]]
    np.testing.assert_allclose([vector_of(text) for text in TEXTS], vectors, rtol=1e-6)
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    assert {"promptTokenCount": tokens, "totalTokenCount": tokens} == reply.json()["usageMetadata"]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"taskType": "RETRIEVAL_QUERY"}, "q: "),
        ({"task_type": "QUESTION_ANSWERING"}, "q: "),
        ({"embedContentConfig": {"taskType": "RETRIEVAL_DOCUMENT"}}, "d: "),
        ({"taskType": "TASK_TYPE_UNSPECIFIED"}, ""),
        ({"taskType": None, "title": ""}, ""),
    ],
)
async def test_a_task_selects_the_models_prompt(boot: Boots, options: dict[str, Any], prompt: str) -> None:
    async with boot(fakes(), PROMPTED) as gateway:
        reply = await gateway.post("/v1beta/models/bge:embedContent", request("red", **options))

    np.testing.assert_allclose(vector_of(prompt + "red"), reply.json()["embedding"]["values"], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"outputDimensionality": 4},
        {"output_dimensionality": 4},
        {"embedContentConfig": {"outputDimensionality": 4}},
    ],
)
async def test_the_width_is_cut_in_each_spelling(boot: Boots, options: dict[str, Any]) -> None:
    reply = await posted(boot(fakes()), "/v1/models/bge:embedContent", request("red", **options))

    cut = vector_of("red")[:4]
    np.testing.assert_allclose(cut / np.linalg.norm(cut), reply.json()["embedding"]["values"], rtol=1e-5)


def inline(kind: str) -> dict[str, Any]:
    return {"inlineData": {"mimeType": kind, "data": "AAAA"}}


async def test_texts_of_several_parts_are_lines_of_one_text(boot: Boots) -> None:
    parts = [{"text": "red"}, {"text": "green"}]
    reply = await posted(boot(fakes()), "/v1/models/bge:embedContent", {"content": {"parts": parts}})
    count = await posted(boot(fakes()), COUNT, {"contents": [{"parts": parts}]})

    np.testing.assert_allclose(vector_of("red\ngreen"), reply.json()["embedding"]["values"], rtol=1e-5)
    assert reply.json()["usageMetadata"]["totalTokenCount"] == count.json()["totalTokens"]


TEXT = {"parts": [{"text": "a"}]}
# Two spellings of a field, with two values.
TWO_KINDS = {"inlineData": {"mimeType": "image/png", "mime_type": "audio/wav", "data": "AAAA"}}
TWO_BLOBS = {**inline("image/png"), "inline_data": {"mimeType": "image/png", "data": "BBBB"}}
TWO_FILES = {"fileData": {"fileUri": "https://a.example/a"}, "file_data": {"fileUri": "https://a.example/b"}}
TWO_ADDRESSES = {"fileData": {"fileUri": "https://a.example/a", "file_uri": "https://a.example/b"}}
EMBED, BATCH, COUNT = (f"/v1beta/models/bge:{method}" for method in METHODS)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (EMBED, request("red", title="colors"), "title"),
        (EMBED, request("red", model="models/other"), "the path has"),
        (EMBED, request("red", taskType="CLUSTERING", task_type="CLASSIFICATION"), "two values"),
        (EMBED, request("red", taskType="X"), "allowed: "),
        (EMBED, request(""), "empty"),
        (EMBED, {"content": {"parts": [{"text": "a"}, {"text": ""}]}}, "empty text"),
        (EMBED, {"content": {"parts": []}}, "no part"),
        (EMBED, {"content": {"parts": [{}]}}, "without `text`"),
        (EMBED, {"content": {"parts": [{"text": "a", "inlineData": {"data": "AA=="}}]}}, "several of them"),
        (EMBED, {"content": {"parts": [{"inlineData": {"mimeType": "image/png"}}]}}, "data"),
        (EMBED, {"content": {"parts": [TWO_KINDS]}}, "`mimeType` has two values"),
        (EMBED, {"content": {"parts": [TWO_BLOBS]}}, "`inlineData` has two values"),
        (EMBED, {"content": {"parts": [TWO_FILES]}}, "`fileData` has two values"),
        (EMBED, {"content": {"parts": [TWO_ADDRESSES]}}, "`fileUri` has two values"),
        (EMBED, {"content": {"parts": [inline("video/mp4")]}}, "'video/mp4'"),
        (EMBED, {"content": {"parts": [inline("application/pdf")]}}, "'application/pdf'"),
        (EMBED, {"content": {"parts": [inline("image/png")]}}, "damaged"),
        (EMBED, request("w " * 60, embedContentConfig={"autoTruncate": False}), "token"),
        (BATCH, {"requests": [request("red", taskType="CLUSTERING"), request("blue")]}, "taskType"),
        (COUNT, {"contents": []}, "contents"),
        (COUNT, {"contents": [{"parts": [{"text": "a"}, inline("image/png")]}]}, "no text"),
        (COUNT, {"contents": [TEXT], "tools": [{}]}, "tools"),
        (COUNT, {"contents": [TEXT], "systemInstruction": {"parts": []}}, "systemInstruction"),
    ],
)
async def test_refuses_what_it_does_not_compute(
    boot: Boots, path: str, body: dict[str, Any], reason: str
) -> None:
    reply = await posted(boot(fakes()), path, body)

    error = reply.json()["error"]
    assert (400, 400, "INVALID_ARGUMENT") == (reply.status_code, error["code"], error["status"]), reply.text
    assert reason in error["message"]


async def test_lists_and_describes_the_models_that_embed(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        listed = (await gateway.client.get("/v1beta/models")).json()["models"]
        one = (await gateway.client.get("/v1beta/models/org/bge")).json()
        missing = await gateway.client.get("/v1beta/models/cross")

    assert ["bge", "org/bge", "strict", "no-rerank"] == [model["displayName"] for model in listed]
    assert one == listed[1]
    assert ("models/org/bge", 16) == (one["name"], one["inputTokenLimit"])
    assert (404, "NOT_FOUND") == (missing.status_code, missing.json()["error"]["status"])


@pytest.mark.parametrize("path", ["", "/org/bge", "/org%2Fbge", "/cross", "/none"])
async def test_a_key_of_googles_clients_reads_their_models_below_v1(boot: Boots, path: str) -> None:
    async with boot(fakes()) as gateway:
        del gateway.client.headers["authorization"]
        expected, found, wrong, openais, both = [
            await gateway.client.get(f"/{version}/models{path}", headers=headers)
            for version, headers in (
                ("v1beta", {"x-goog-api-key": KEY}),
                ("v1", {"x-goog-api-key": KEY}),
                ("v1", {"x-goog-api-key": "wrong"}),
                ("v1", {"authorization": f"Bearer {KEY}"}),
                ("v1", {"authorization": f"Bearer {KEY}", "x-goog-api-key": KEY}),
            )
        ]

    assert (expected.status_code, expected.json()) == (found.status_code, found.json())
    assert (401, "UNAUTHENTICATED") == (wrong.status_code, wrong.json()["error"]["status"])
    assert openais.json() == both.json()
    assert openais.status_code == 404 or openais.json()["object"] in {"list", "model"}


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_counts_the_tokens_of_all_contents(boot: Boots, version: str) -> None:
    body = {"contents": [request(text)["content"] for text in TEXTS]}
    reply = await posted(boot(fakes()), f"/{version}/models/org/bge:countTokens", body)

    assert {"totalTokens": sum(len(text.split()) + 2 for text in TEXTS)} == reply.json()
