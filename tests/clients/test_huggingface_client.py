"""Hugging Face's InferenceClient, which accepts the URL of a TEI route in place of a model name."""

import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.inference._providers import get_provider_helper, hf_inference

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


@pytest.fixture
def client(gateway: Gateway) -> InferenceClient:
    """Return a client that sends the key to every URL."""
    return InferenceClient(provider="hf-inference", token=gateway.key, timeout=60)


def model_url(gateway: Gateway, model: str, route: str = "") -> str:
    """Return the URL of a model's route, or of its default operation."""
    return f"{gateway.url}/models/{model}{route}"


@pytest.mark.parametrize("route", ["", "/embed"])
def test_feature_extraction_returns_vectors_of_length_1(
    client: InferenceClient, gateway: Gateway, route: str
) -> None:
    vectors = client.feature_extraction(TEXTS, model=model_url(gateway, gateway.model, route))  # type: ignore[arg-type]

    assert ((3, DIMENSIONS), np.float32) == (vectors.shape, vectors.dtype)
    np.testing.assert_allclose(1, np.linalg.norm(vectors, axis=1), atol=1e-5)


async def test_async_client_gets_the_same_vectors(client: InferenceClient, gateway: Gateway) -> None:
    url = model_url(gateway, gateway.model)
    async_client = AsyncInferenceClient(provider="hf-inference", token=gateway.key, timeout=60)
    vectors = await async_client.feature_extraction("an apple", model=url)

    np.testing.assert_allclose(client.feature_extraction("an apple", model=url), vectors, atol=1e-6)


def test_feature_extraction_applies_its_options(client: InferenceClient, gateway: Gateway) -> None:
    url = model_url(gateway, gateway.prompted, "/embed")
    plain = client.feature_extraction("an apple", model=url)
    (long,) = client.feature_extraction("an apple", model=url, normalize=False)
    (short,) = client.feature_extraction("an apple", model=url, dimensions=64, encoding_format="float")
    prompted = client.feature_extraction("an apple", model=url, prompt_name="query")
    with_text = client.feature_extraction("query: an apple", model=url)
    left, right = (
        client.feature_extraction(
            "a " * 600 + "z " * 600, model=url, truncate=True, truncation_direction=side
        )
        for side in ("left", "right")
    )

    np.testing.assert_allclose(plain[0], long / np.linalg.norm(long), atol=1e-5)
    assert not np.isclose(1, np.linalg.norm(long))
    np.testing.assert_allclose(plain[0][:64] / np.linalg.norm(plain[0][:64]), short, atol=1e-5)
    np.testing.assert_allclose(with_text, prompted, atol=1e-5)
    assert not np.allclose(left, right, atol=1e-2)


@pytest.mark.parametrize("route", ["", "/similarity"])
def test_sentence_similarity_is_the_cosine(client: InferenceClient, gateway: Gateway, route: str) -> None:
    url = model_url(gateway, gateway.model)
    source, *vectors = client.feature_extraction(TEXTS, model=url)  # type: ignore[arg-type]
    scores = client.sentence_similarity(TEXTS[0], TEXTS[1:], model=url + route)

    assert [float(source @ vector) for vector in vectors] == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize("route", ["", "/predict"])
def test_text_classification_returns_the_likeliest_label(
    client: InferenceClient, gateway: Gateway, route: str
) -> None:
    # The client returns only the first label of TEI's reply to one text.
    label = client.text_classification("what a day", model=model_url(gateway, gateway.labels, route))

    assert label["label"] in {"joy", "anger", "fear"}  # type: ignore[call-overload]
    assert 1 / 3 < label["score"] <= 1  # type: ignore[call-overload]


def test_rerank_route_ranks_texts(client: InferenceClient, gateway: Gateway) -> None:
    """The client has no method for reranking, but its session sends keys and raises errors."""
    from huggingface_hub.utils import get_session

    body = {"query": "fruit to eat", "texts": TEXTS}
    headers = {"authorization": f"Bearer {client.token}"}
    ranks = (
        get_session().post(model_url(gateway, gateway.model, "/rerank"), json=body, headers=headers).json()
    )

    assert 1 == ranks[0]["index"]
    assert {0, 1, 2} == {rank["index"] for rank in ranks}


@pytest.mark.parametrize(
    ("model", "route", "text", "status"),
    [
        ("nowhere", "", "a", 404),
        ("strict", "/embed", "word " * 1000, 422),
        ("cross", "/embed", "a", 424),
        ("all-minilm-l6-v2", "/embed", "", 400),
    ],
)
def test_errors_are_the_clients_own(
    client: InferenceClient, gateway: Gateway, model: str, route: str, text: str, status: int
) -> None:
    with pytest.raises(HfHubHTTPError) as raised:
        client.feature_extraction(text, model=model_url(gateway, model, route))

    assert status == raised.value.response.status_code
    assert {"error", "error_type"} == raised.value.response.json().keys()


def test_wrong_key_is_rejected(gateway: Gateway) -> None:
    client = InferenceClient(provider="hf-inference", token="wrong", timeout=60)
    with pytest.raises(HfHubHTTPError, match="401"):
        client.feature_extraction("a", model=model_url(gateway, gateway.model))


@pytest.mark.parametrize("prefix", ["", "/hf-inference"])
def test_tasks_have_paths_of_their_own(client: InferenceClient, gateway: Gateway, prefix: str) -> None:
    start = f"{gateway.url}{prefix}/models/{gateway.model}/pipeline"
    vectors = client.feature_extraction(TEXTS, model=f"{start}/feature-extraction")  # type: ignore[arg-type]
    scores = client.sentence_similarity(TEXTS[0], TEXTS, model=f"{start}/sentence-similarity")

    assert (3, DIMENSIONS) == vectors.shape
    np.testing.assert_allclose(vectors @ vectors[0], scores, atol=1e-5)


def test_the_hubs_router_is_replaced_by_the_gateway(
    client: InferenceClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks the Hub which tasks a model has; that request is not the gateway's."""
    helper = get_provider_helper("hf-inference", "feature-extraction", gateway.model)
    monkeypatch.setattr(hf_inference, "_check_supported_task", lambda _model, _task: None)
    monkeypatch.setattr(helper, "base_url", f"{gateway.url}/hf-inference")

    assert (3, DIMENSIONS) == client.feature_extraction(TEXTS, model=gateway.model).shape  # type: ignore[arg-type]
