"""Client that openapi-python-client generates from the gateway's own OpenAPI document."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.clients.conftest import Gateway

GENERATE_S = 120.0
NAME = "generated_gateway_client"


@pytest.fixture(scope="module")
def package(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Generate the client without any setting, and import it."""
    home = tmp_path_factory.mktemp("generated")
    command = [Path(sys.executable).parent / "openapi-python-client", "generate", "--meta", "none"]
    url, target = f"{gateway.url}/docs/openapi.json", home / NAME
    done = subprocess.run(
        [*command, "--url", url, "--output-path", target],
        capture_output=True,
        text=True,
        timeout=GENERATE_S,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    # A schema that it cannot read is left out, with every path that needs it.
    assert "Unable to" not in done.stdout, done.stdout
    sys.path.insert(0, str(home))
    yield importlib.import_module(NAME)
    sys.path.remove(str(home))


def part(package: ModuleType, name: str) -> Any:
    return importlib.import_module(f"{package.__name__}.{name}")


@pytest.fixture(scope="module")
def client(gateway: Gateway, package: Any) -> Any:
    return package.AuthenticatedClient(base_url=gateway.url, token=gateway.key)


def test_embeds(gateway: Gateway, package: Any, client: Any) -> None:
    models, embeddings = part(package, "models"), part(package, "api.open_ai.post_v1_embeddings")
    body = models.OpenAIEmbeddingsRequest(["an apple", "the sea"], model=gateway.model, dimensions=64)
    reply = embeddings.sync(client=client, body=body)

    assert isinstance(reply, models.OpenAIEmbeddingsResponse)
    assert [64, 64] == [len(item.embedding) for item in reply.data]
    assert reply.usage.total_tokens > 0


async def test_embeds_asynchronously(gateway: Gateway, package: Any, client: Any) -> None:
    models, embeddings = part(package, "models"), part(package, "api.open_ai.post_v1_embeddings")
    body = models.OpenAIEmbeddingsRequest(["an apple"], model=gateway.model)
    reply = await embeddings.asyncio(client=client, body=body)

    assert 384 == len(reply.data[0].embedding)


def test_reranks(gateway: Gateway, package: Any, client: Any) -> None:
    models, rerank = part(package, "models"), part(package, "api.cohere_and_jina.post_v2_rerank")
    body = models.RerankRequest("fruit", ["a car", "an apple", "the sea"], model=gateway.model, top_n=2)
    reply = rerank.sync(client=client, body=body)

    assert [1] == [result.index for result in reply.results][:1]
    assert 2 == len(reply.results)


def test_lists_models(gateway: Gateway, package: Any, client: Any) -> None:
    reply = part(package, "api.open_ai.get_v1_models").sync(client=client)

    assert gateway.model in {item.id for item in reply.data}


def test_an_error_is_its_struct(package: Any, client: Any) -> None:
    models, embeddings = part(package, "models"), part(package, "api.open_ai.post_v1_embeddings")
    reply = embeddings.sync_detailed(client=client, body=models.OpenAIEmbeddingsRequest("a", model="nowhere"))

    assert 404 == reply.status_code
    assert isinstance(reply.parsed, models.OpenAIError)
    assert "nowhere" in reply.parsed.error.message
