"""Ollama's endpoints below /api."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from gateway import __version__
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, posted
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import vector_of

ZEROS = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
TEXTS = ["red", "green and blue"]


@pytest.mark.parametrize("model", [{}, {"model": "bge"}, {"model": "bge:latest"}])
@pytest.mark.parametrize("sent", [TEXTS, TEXTS[0]])
async def test_embed_returns_one_vector_for_each_input(boot: Boots, model: dict[str, str], sent: Any) -> None:
    body = model | {"input": sent, "keep_alive": "5m", "options": {"temperature": 0, "num_gpu": None}}
    reply = await posted(boot(fakes()), "/api/embed", body)

    texts = [sent] if isinstance(sent, str) else sent
    data = reply.json()
    np.testing.assert_allclose([vector_of(text) for text in texts], data["embeddings"], rtol=1e-6)
    assert ("bge", sum(len(text.split()) + 2 for text in texts)) == (data["model"], data["prompt_eval_count"])
    assert 0 <= data["load_duration"] < data["total_duration"]


async def test_embed_cuts_dimensions(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        replies = [
            await gateway.post("/api/embed", {"input": TEXTS, "dimensions": width}) for width in (0, 4)
        ]

    whole, cut = (np.array(reply.json()["embeddings"]) for reply in replies)
    np.testing.assert_allclose(whole[:, :4] / np.linalg.norm(whole[:, :4], axis=1, keepdims=True), cut, 1e-5)


@pytest.mark.parametrize("width", [8, 9, 768])
async def test_embed_returns_whole_vectors_for_a_width_above_the_models(boot: Boots, width: int) -> None:
    reply = await posted(boot(fakes()), "/api/embed", {"model": "bge", "input": TEXTS, "dimensions": width})

    assert 200 == reply.status_code, reply.text
    np.testing.assert_allclose([vector_of(text) for text in TEXTS], reply.json()["embeddings"], rtol=1e-6)


async def test_a_width_names_no_model_that_does_not_exist(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        plain, wide = [
            await gateway.post("/api/embed", {"model": "nowhere", "input": TEXTS} | width)
            for width in ({}, {"dimensions": 768})
        ]

    assert (404, plain.json()) == (wide.status_code, wide.json())


async def test_the_older_form_embeds_one_text(boot: Boots) -> None:
    reply = await posted(boot(fakes()), "/api/embeddings", {"model": "bge", "prompt": "red", "keep_alive": 0})

    assert {"embedding"} == reply.json().keys()
    np.testing.assert_allclose(vector_of("red"), reply.json()["embedding"], rtol=1e-6)


@pytest.mark.parametrize(("context", "status"), [(100_000, 200), (12, 200), (4, 400)])
async def test_num_ctx_bounds_the_tokens_of_an_input(boot: Boots, context: int, status: int) -> None:
    """Ten bytes have at most ten tokens, so that only the last bound needs the model's tokenizer."""
    async with boot(fakes()) as gateway:
        reply = await gateway.post("/api/embed", {"input": "ten bytes.", "options": {"num_ctx": context}})

    assert status == reply.status_code
    assert ("tokenizer" in reply.text) is (status == 400)


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/api/embed", {"input": ["a", ""]}, 400, "empty"),
        ("/api/embed", {"input": [], "model": "llama"}, 404, "llama"),
        ("/api/embed", {"input": "", "model": "cross"}, 400, "does not embed"),
        ("/api/embed", {"input": [1]}, 400, "token ids"),
        ("/api/embed", {"input": "a", "model": "llama:latest"}, 404, "llama"),
        ("/api/embed", {"input": "a", "model": "cross"}, 400, "does not embed"),
        ("/api/embed", {"input": "w " * 60, "truncate": False}, 400, "token"),
        ("/api/embeddings", {"prompt": "", "model": "llama"}, 404, "llama"),
        ("/api/show", {"model": "cross"}, 404, "cross"),
        ("/api/show", {"model": "bge", "template": "{{ x }}"}, 400, "template"),
        ("/api/generate", {"model": "bge", "prompt": "a"}, 404, "nothing at this path"),
    ],
)
async def test_errors_are_one_sentence(
    boot: Boots, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert status == reply.status_code, reply.text
    assert {"error"} == reply.json().keys()
    assert reason in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/api/embed", {"input": []}, {"model": "bge", "embeddings": []} | ZEROS),
        (
            "/api/embed",
            {"input": "", "model": "org/bge:latest"},
            {"model": "org/bge", "embeddings": []} | ZEROS,
        ),
        ("/api/embeddings", {"prompt": ""}, {"embedding": []}),
    ],
)
async def test_an_empty_input_is_an_empty_list_and_counts_as_a_request(
    boot: Boots, path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    text = CONFIG + f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"], limits: {{requests_per_month: 2}}}}}}\n'
    async with boot(fakes(), text) as gateway:
        replies = [await gateway.post(path, body) for _ in range(3)]

    assert [200, 200, 429] == [reply.status_code for reply in replies]
    assert expected == replies[0].json()
    assert "1" == replies[0].headers["x-ratelimit-remaining-requests"]


async def test_models_that_answer_at_once_are_running(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        running = (await gateway.client.get("/api/ps")).json()["models"]
        keyless = await gateway.client.get("/api/ps", headers={"authorization": ""})
    async with boot({"rerank-0": fakes()["rerank-0"]}, wait=False) as gateway:
        none = (await gateway.client.get("/api/ps")).json()

    assert ["bge", "org/bge", "strict", "no-rerank"] == [model["model"] for model in running]
    assert (0, 16) == (running[0]["size_vram"], running[0]["context_length"])
    assert datetime.fromisoformat(running[0]["expires_at"]) > datetime.now(UTC)
    assert (401, {"models": []}) == (keyless.status_code, none)


async def test_lists_and_describes_the_models_that_embed(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        tags = (await gateway.client.get("/api/tags")).json()["models"]
        shown = (await gateway.post("/api/show", {"name": "org/bge", "verbose": True})).json()
        version = await gateway.client.get("/api/version", headers={"authorization": ""})

    assert ["bge", "org/bge", "strict", "no-rerank"] == [model["model"] for model in tags]
    assert tags[0]["name"] == tags[0]["model"]
    assert ["embedding"] == shown["capabilities"]
    assert 16 == shown["model_info"]["gateway.context_length"]
    assert {"version": __version__} == version.json()
