"""LiteLLM's SDK, with the providers whose dialects the gateway serves."""

import os
from typing import Any

# The SDK fetches its table of prices from the internet otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

from tests.clients.conftest import Gateway

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384
# Paths of `api_base`, as each provider completes them.
EMBED = {
    "openai": "/v1",
    "cohere": "/v2/embed",
    "jina_ai": "/v1",
    "voyage": "/v1",
    "infinity": "/infinity",
    "hosted_vllm": "/v1",
    "nvidia_nim": "/v1",
    "azure": "",
    "litellm_proxy": "",
}
CUT = ["cohere", "jina_ai", "voyage", "infinity", "hosted_vllm"]
RERANK = {
    "cohere": "/v2/rerank",
    "jina_ai": "/v1/rerank",
    "voyage": "/v1",
    "infinity": "/infinity",
    "hosted_vllm": "",
    "litellm_proxy": "",
    "together_ai": "",
}


def embed(gateway: Gateway, provider: str, model: str | None = None, **options: Any) -> Any:
    """Return a provider's reply to DOCUMENTS."""
    settings = {"api_key": gateway.key, "api_version": "2024-10-21", "timeout": 60} | options
    if provider != "azure":
        del settings["api_version"]
    name = f"{provider}/{model or gateway.model}"
    return litellm.embedding(model=name, input=DOCUMENTS, api_base=gateway.url + EMBED[provider], **settings)


def rerank(gateway: Gateway, provider: str, model: str | None = None, **options: Any) -> Any:
    """Return a provider's two best of DOCUMENTS."""
    settings = {"api_key": gateway.key, "timeout": 60, "top_n": 2} | options
    return litellm.rerank(
        model=f"{provider}/{model or gateway.model}",
        query="fruit to eat",
        documents=DOCUMENTS,
        api_base=gateway.url + RERANK[provider],
        **settings,
    )


@pytest.mark.parametrize("provider", EMBED)
def test_providers_return_the_same_vectors(gateway: Gateway, provider: str) -> None:
    reply, expected = embed(gateway, provider), embed(gateway, "openai")

    for item, same in zip(reply.data, expected.data, strict=True):
        assert DIMENSIONS == len(item["embedding"])
        assert same["embedding"] == pytest.approx(item["embedding"], abs=1e-3)
    assert expected.usage.prompt_tokens == reply.usage.prompt_tokens


@pytest.mark.parametrize("provider", CUT)
def test_providers_cut_dimensions(gateway: Gateway, provider: str) -> None:
    assert [64] * 4 == [len(item["embedding"]) for item in embed(gateway, provider, dimensions=64).data]


@pytest.mark.parametrize("provider", RERANK)
def test_providers_rerank_in_the_same_order(gateway: Gateway, provider: str) -> None:
    results, expected = rerank(gateway, provider).results, rerank(gateway, "cohere").results

    assert {1, 3} == {result["index"] for result in results}
    assert [result["index"] for result in expected] == [result["index"] for result in results]
    for result, same in zip(results, expected, strict=True):
        assert same["relevance_score"] == pytest.approx(result["relevance_score"], abs=1e-3)


def test_nvidias_hosted_api_ranks_every_document(gateway: Gateway) -> None:
    """Its path names the model, and this provider sends no `top_n`."""
    results = litellm.rerank(
        model=f"nvidia_nim/{gateway.cross}",
        query="fruit to eat",
        documents=DOCUMENTS,
        api_base=gateway.url,
        api_key=gateway.key,
        timeout=60,
    ).results

    assert [0, 1, 2, 3] == sorted(result["index"] for result in results)
    scores = [result["relevance_score"] for result in results]
    assert sorted(scores, reverse=True) == scores


def test_rerank_of_tei(gateway: Gateway) -> None:
    reply = litellm.rerank(
        model=f"huggingface/{gateway.model}",
        query="fruit to eat",
        documents=DOCUMENTS,
        api_base=f"{gateway.url}/models/{gateway.model}",
        api_key=gateway.key,
    )

    assert {1, 3} == {result["index"] for result in reply.results[:2]}
    assert 4 == len(reply.results)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "voyage", "infinity"])
def test_errors_of_embeddings_are_the_clients_own(gateway: Gateway, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="nowhere"):
        embed(gateway, provider, model="nowhere")
    with pytest.raises(litellm.AuthenticationError):
        embed(gateway, provider, api_key="wrong")


@pytest.mark.parametrize("provider", ["cohere", "jina_ai", "infinity", "hosted_vllm"])
def test_errors_of_rerank_are_the_clients_own(gateway: Gateway, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="nowhere"):
        rerank(gateway, provider, model="nowhere")
    with pytest.raises(litellm.AuthenticationError):
        rerank(gateway, provider, api_key="wrong")
