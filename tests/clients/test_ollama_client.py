"""Ollama's own client for Python, sync and async."""

import math
from datetime import UTC, datetime

import ollama
import pytest

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def client(gateway: Gateway) -> ollama.Client:
    return ollama.Client(gateway.url, headers=headers(gateway.key))


def test_embeds_a_list_in_order(client: ollama.Client, gateway: Gateway) -> None:
    reply = client.embed(gateway.model, TEXTS, keep_alive="5m", options={"temperature": 0, "num_ctx": 8192})

    assert gateway.model == reply.model
    assert [DIMENSIONS] * 3 == [len(vector) for vector in reply.embeddings]
    assert 12 == reply.prompt_eval_count
    assert reply.total_duration
    single = client.embed(f"{gateway.model}:latest", TEXTS[1])
    assert list(reply.embeddings[1]) == pytest.approx(list(single.embeddings[0]), abs=1e-6)


def test_cuts_dimensions_and_inputs(client: ollama.Client, gateway: Gateway) -> None:
    (cut,) = client.embed(gateway.model, TEXTS[0], dimensions=64).embeddings
    assert (64, pytest.approx(1.0, abs=1e-5)) == (len(cut), math.hypot(*cut))
    long = "a car and a boat " * 20
    short = client.embed(gateway.model, long, options={"num_ctx": 16})
    assert 16 == short.prompt_eval_count


async def test_the_async_client_and_the_older_form_agree(client: ollama.Client, gateway: Gateway) -> None:
    reply = await ollama.AsyncClient(gateway.url, headers=headers(gateway.key)).embed(gateway.model, "a car")
    older = client.embeddings(gateway.model, "a car")

    assert list(reply.embeddings[0]) == pytest.approx(list(older.embedding), abs=1e-6)


def test_the_key_comes_from_the_environment(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", gateway.key)
    monkeypatch.setenv("OLLAMA_HOST", gateway.url)

    assert ollama.Client().embed(gateway.model, "a car").embeddings


def test_lists_and_describes_models(client: ollama.Client, gateway: Gateway) -> None:
    models = {model.model: model for model in client.list().models}
    shown = client.show(gateway.model)

    assert {gateway.model, gateway.prompted} <= models.keys()
    assert gateway.labels not in models
    assert models[gateway.model].modified_at < datetime.now(UTC)
    assert ["embedding"] == shown.capabilities
    assert DIMENSIONS == shown.modelinfo["gateway.embedding_length"]


def test_loads_a_model_with_an_empty_input_and_finds_it_running(
    client: ollama.Client, gateway: Gateway
) -> None:
    assert [] == client.embed(gateway.model, []).embeddings == client.embed(gateway.model, "").embeddings
    assert [] == client.embeddings(gateway.model, "").embedding
    running = {model.model: model for model in client.ps().models}

    assert gateway.model in running
    expires_at = running[gateway.model].expires_at
    assert expires_at is not None
    assert expires_at > datetime.now(UTC)


@pytest.mark.parametrize(("key", "model", "status"), [("wrong", "a", 401), (None, "nowhere", 404)])
def test_errors_are_its_own(gateway: Gateway, key: str | None, model: str, status: int) -> None:
    client = ollama.Client(gateway.url, headers=headers(key or gateway.key))
    with pytest.raises(ollama.ResponseError) as raised:
        client.embed(model, "a")

    assert status == raised.value.status_code
    assert "{" not in raised.value.error


def test_a_text_that_must_not_be_cut_is_refused(client: ollama.Client, gateway: Gateway) -> None:
    with pytest.raises(ollama.ResponseError, match="token") as raised:
        client.embed(gateway.model, "word " * 600, truncate=False)
    assert 400 == raised.value.status_code
