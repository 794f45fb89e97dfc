"""semantic-router's encoders and its router, through Cohere's and Hugging Face's API."""

import numpy as np
import pytest
from semantic_router import Route
from semantic_router.encoders import CohereEncoder, HFEndpointEncoder
from semantic_router.routers import IndexedRouter

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


@pytest.fixture
def cohere(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> CohereEncoder:
    """Return the encoder for Cohere; its client reads the address from the environment."""
    monkeypatch.setenv("CO_API_URL", gateway.url)
    return CohereEncoder(name=gateway.model, cohere_api_key=gateway.key)


def test_encoders_of_cohere_and_hugging_face_agree(gateway: Gateway, cohere: CohereEncoder) -> None:
    endpoint = HFEndpointEncoder(
        huggingface_url=f"{gateway.url}/models/{gateway.model}/embed", huggingface_api_key=gateway.key
    )
    expected = np.array(cohere(TEXTS))

    assert (3, DIMENSIONS) == expected.shape
    # The library leaves the list around each vector that TEI's reply has.
    np.testing.assert_allclose(expected, np.array(endpoint(TEXTS)).reshape(3, DIMENSIONS), atol=1e-4)


def test_a_router_finds_the_route_of_a_question(cohere: CohereEncoder) -> None:
    fruit = Route(name="fruit", utterances=["apples and pears", "a ripe banana", "which fruit is sweet?"])
    traffic = Route(name="traffic", utterances=["cars on the road", "a traffic jam", "drive to work"])
    router = IndexedRouter(encoder=cohere, routes=[fruit, traffic])

    assert "fruit" == router("I would like to eat an orange").name
    assert "traffic" == router("the bus is stuck between lorries").name


def test_an_unknown_key_is_an_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CO_API_URL", gateway.url)
    wrong = CohereEncoder(name=gateway.model, cohere_api_key="wrong")
    with pytest.raises(ValueError, match="401"):
        wrong(TEXTS)
