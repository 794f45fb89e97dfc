"""Infinity's own clients: the client generated from its OpenAPI document, and the batching client."""

import numpy as np
import PIL.Image
import pytest
from infinity_client import errors
from infinity_client.api.default import classify, embeddings, embeddings_image, health, models, rerank
from infinity_client.client import AuthenticatedClient
from infinity_client.models import (
    ClassifyInput,
    HTTPValidationError,
    ImageEmbeddingInput,
    OpenAIEmbeddingInputImage,
    OpenAIEmbeddingInputImageModality,
    OpenAIEmbeddingInputText,
    OpenAIEmbeddingResult,
    RerankInput,
)
from infinity_client.vision_client import InfinityVisionAPI

from tests.clients.conftest import Gateway, Pictures

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


@pytest.fixture
def client(gateway: Gateway) -> AuthenticatedClient:
    """Return a client that raises on unexpected statuses instead of hiding them."""
    return AuthenticatedClient(
        base_url=f"{gateway.url}/infinity", token=gateway.key, raise_on_unexpected_status=True
    )


def embed(client: AuthenticatedClient, body: OpenAIEmbeddingInputText) -> OpenAIEmbeddingResult:
    reply = embeddings.sync(client=client, body=body)
    assert isinstance(reply, OpenAIEmbeddingResult)
    return reply


def test_vectors_come_in_order_with_usage(client: AuthenticatedClient, gateway: Gateway) -> None:
    reply = embed(client, OpenAIEmbeddingInputText(input_=TEXTS, model=gateway.model))

    assert [0, 1, 2] == [item.index for item in reply.data]
    assert [DIMENSIONS] * 3 == [len(item.embedding) for item in reply.data]
    # Tokens of the model, with specials, where Infinity would count 18 characters.
    assert 12 == reply.usage.total_tokens


def test_uses_the_default_model_without_a_name(client: AuthenticatedClient, gateway: Gateway) -> None:
    reply = embed(client, OpenAIEmbeddingInputText(input_="a car"))

    assert gateway.model == reply.model


async def test_async_client_gets_the_same_vectors(client: AuthenticatedClient, gateway: Gateway) -> None:
    body = OpenAIEmbeddingInputText(input_=TEXTS, model=gateway.model, dimensions=64)
    reply = await embeddings.asyncio(client=client, body=body)

    assert isinstance(reply, OpenAIEmbeddingResult)
    for item, async_item in zip(embed(client, body).data, reply.data, strict=True):
        assert item.embedding == pytest.approx(async_item.embedding, abs=1e-6)


def test_batching_client_gets_base64_with_a_key_in_its_url(
    client: AuthenticatedClient, gateway: Gateway
) -> None:
    url = gateway.url.replace("http://", f"http://:{gateway.key}@")
    many = InfinityVisionAPI(f"{url}/infinity", model=gateway.model)
    futures = [many.embed(gateway.model, [text]) for text in TEXTS]

    plain = embed(client, OpenAIEmbeddingInputText(input_=TEXTS, model=gateway.model))
    for item, future in zip(plain.data, futures, strict=True):
        (vectors,), _ = future.result(timeout=60)
        np.testing.assert_allclose([item.embedding], vectors, atol=1e-3)


def test_rerank_puts_the_best_documents_first(client: AuthenticatedClient, gateway: Gateway) -> None:
    body = RerankInput(
        query="fruit to eat", documents=TEXTS, model=gateway.model, top_n=2, return_documents=True
    )
    reply = rerank.sync(client=client, body=body)

    assert not isinstance(reply, HTTPValidationError | None)
    best, second = reply.results
    assert (1, "an apple") == (best.index, best.document)
    assert best.relevance_score > second.relevance_score


def test_labels_come_best_first(client: AuthenticatedClient, gateway: Gateway) -> None:
    reply = classify.sync(client=client, body=ClassifyInput(input_=TEXTS, model=gateway.labels))

    assert not isinstance(reply, HTTPValidationError | None)
    for labels in reply.data:
        assert {"joy", "anger", "fear"} == {label.label for label in labels}
        assert sorted((label.score for label in labels), reverse=True) == [label.score for label in labels]


def test_lists_models_and_reports_health(client: AuthenticatedClient, gateway: Gateway) -> None:
    listing = models.sync(client=client)
    status = health.sync(client=client)

    assert listing is not None
    assert {gateway.model, gateway.cross} <= {model.id for model in listing.data}
    assert status is not None
    assert status["unix"] > 0


def test_invalid_body_is_the_clients_validation_error(client: AuthenticatedClient, gateway: Gateway) -> None:
    reply = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_="", model=gateway.model))

    assert isinstance(reply, HTTPValidationError)
    assert "empty" in reply.detail[0].msg  # type: ignore[index]


@pytest.mark.parametrize(("key", "model", "status"), [(None, "nowhere", 404), ("wrong", "a", 401)])
def test_other_errors_are_raised_with_their_body(
    client: AuthenticatedClient, key: str | None, model: str, status: int
) -> None:
    if key:
        client.token = key
    with pytest.raises(errors.UnexpectedStatus) as raised:
        embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_="a", model=model))

    assert status == raised.value.status_code
    assert b"detail" in raised.value.content


def test_pictures_have_the_vectors_of_the_model(
    client: AuthenticatedClient, gateway: Gateway, pictures: Pictures
) -> None:
    old = embeddings_image.sync(
        client=client, body=ImageEmbeddingInput(input_=pictures.uris, model=gateway.clip)
    )
    image = OpenAIEmbeddingInputImage(
        input_=pictures.uris, model=gateway.clip, modality=OpenAIEmbeddingInputImageModality.IMAGE
    )
    reply = embeddings.sync(client=client, body=image)

    for found in (old, reply):
        assert isinstance(found, OpenAIEmbeddingResult)
        pictures.assert_equal([item.embedding for item in found.data])


def test_batching_client_sends_pictures_as_jpeg(gateway: Gateway, pictures: Pictures) -> None:
    url = gateway.url.replace("http://", f"http://:{gateway.key}@")
    many = InfinityVisionAPI(f"{url}/infinity", model=gateway.clip)
    images = [PIL.Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    vectors, tokens = many.image_embed(gateway.clip, images).result(timeout=60)

    assert [(1, len(pictures.vectors[0]))] * 2 == [vector.shape for vector in vectors]
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    assert tokens > 2


def test_ranks_at_the_path_of_infinitys_server(gateway: Gateway) -> None:
    """Agno's reranker sends these fields there, because it drops the path of its address."""
    client = AuthenticatedClient(base_url=gateway.url, token=gateway.key, raise_on_unexpected_status=True)
    body = RerankInput.from_dict(
        {"model": gateway.model, "query": "fruit to eat", "documents": TEXTS, "return_documents": False}
    )
    reply = rerank.sync(client=client, body=body)

    assert reply is not None
    assert not isinstance(reply, HTTPValidationError)
    assert 1 == reply.results[0].index
    assert {0, 1, 2} == {item.index for item in reply.results}
