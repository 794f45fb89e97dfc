"""SIE's own client, which uses msgpack."""

import numpy as np
import pytest
from sie_sdk.client.errors import RequestError
from sie_sdk.client.sync import SIEClient

from tests.clients.conftest import Gateway

DIMENSIONS = 384
SIZES = {
    "float32": (np.float32, DIMENSIONS),
    "float16": (np.float16, DIMENSIONS),
    "int8": (np.int8, DIMENSIONS),
    "uint8": (np.uint8, DIMENSIONS),
    "binary": (np.uint8, DIMENSIONS // 8),
    "ubinary": (np.uint8, DIMENSIONS // 8),
}


@pytest.fixture
def client(gateway: Gateway) -> SIEClient:
    """Return a client that does not wait for machines to be provisioned."""
    return SIEClient(gateway.url, api_key=gateway.key)


def test_encode_returns_each_items_vector_and_id(client: SIEClient, gateway: Gateway) -> None:
    first, second = client.encode(gateway.prompted, [{"id": "a", "text": "hi"}, {"text": "there"}])

    assert "a" == first["id"]
    assert "id" not in second
    assert 1.0 == pytest.approx(float(np.linalg.norm(first["dense"])), abs=1e-3)


@pytest.mark.parametrize("dtype", SIZES)
def test_encode_returns_every_dtype_in_its_size(client: SIEClient, gateway: Gateway, dtype: str) -> None:
    vector = client.encode(gateway.model, {"text": "hi"}, output_dtype=dtype)["dense"]

    kind, size = SIZES[dtype]
    assert (np.dtype(kind), (size,)) == (vector.dtype, vector.shape)


def test_queries_and_documents_differ_where_the_model_has_prompts(
    client: SIEClient, gateway: Gateway
) -> None:
    query = client.encode(gateway.prompted, {"text": "an apple"}, is_query=True)["dense"]
    document = client.encode(gateway.prompted, {"text": "an apple"}, is_query=False)["dense"]

    assert not np.allclose(query, document)


def test_score_names_and_ranks_items(client: SIEClient, gateway: Gateway) -> None:
    reply = client.score(
        gateway.model, {"id": "q", "text": "fruit"}, [{"text": "a car"}, {"id": "b", "text": "an apple"}]
    )

    assert ("q", gateway.model) == (reply["query_id"], reply["model"])
    assert [("b", 0), ("item-0", 1)] == [(score["item_id"], score["rank"]) for score in reply["scores"]]


def test_lists_models_with_their_outputs(client: SIEClient, gateway: Gateway) -> None:
    models = {model["name"]: model for model in client.list_models()}

    assert {gateway.model, gateway.cross} <= models.keys()
    assert (True, "loaded") == (models[gateway.model]["loaded"], models[gateway.model]["state"])
    assert {"dense": DIMENSIONS} == models[gateway.model]["dims"]
    assert ["score"] == models[gateway.cross]["outputs"]


def test_options_are_applied_or_refused(client: SIEClient, gateway: Gateway) -> None:
    unscaled = client.encode(gateway.model, {"text": "hi"}, options={"normalize": False})["dense"]

    assert DIMENSIONS == len(unscaled)
    with pytest.raises(RequestError, match="lora_id"):
        client.encode(gateway.model, {"text": "hi"}, options={"lora_id": "x"})


def test_errors_have_the_gateways_reason(client: SIEClient) -> None:
    with pytest.raises(RequestError, match="there is no model 'nowhere' here") as raised:
        client.encode("nowhere", {"text": "a"})

    assert (404, "MODEL_NOT_FOUND") == (raised.value.status_code, raised.value.code)
