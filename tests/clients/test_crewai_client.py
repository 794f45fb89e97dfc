"""CrewAI's embedders, by the lines of docs/connect-agents.md."""

from typing import Any

import pytest
from crewai.rag.embeddings.factory import build_embedder

from tests.clients.conftest import FRUIT, Expected, Gateway, assert_vectors, run_documented


def test_the_documented_lines_embed(gateway: Gateway, expected: Expected) -> None:
    function = run_documented(gateway, "connect-agents", "CrewAI")["function"]

    assert_vectors(expected.plain, function(FRUIT))


@pytest.mark.parametrize("provider", ["azure", "cohere", "ollama"])
def test_other_providers_embed(
    provider: str, gateway: Gateway, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CO_API_URL", gateway.url)
    monkeypatch.setenv("OLLAMA_API_KEY", gateway.key)
    config: dict[str, Any] = {"model_name": gateway.model}
    if provider == "azure":
        version = {"api_version": "2024-10-21", "deployment_id": gateway.model}
        config |= version | {"api_base": gateway.url, "api_key": gateway.key}
    config |= {"url": gateway.url} if provider == "ollama" else {"api_key": gateway.key}

    assert_vectors(expected.plain, build_embedder({"provider": provider, "config": config})(FRUIT))


def test_an_error_has_the_gateways_reason(gateway: Gateway) -> None:
    config = {"model_name": "missing", "api_base": f"{gateway.url}/v1", "api_key": gateway.key}

    with pytest.raises(Exception, match="there is no model 'missing'"):
        build_embedder({"provider": "openai", "config": config})(FRUIT)
