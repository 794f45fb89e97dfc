"""Amazon's client of SageMaker: an endpoint is the name of a model, and the key stands in a header."""

import json
from typing import Any

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.clients.conftest import Gateway

DIMENSIONS = 384


def client_of(gateway: Gateway, key: str) -> Any:
    """Return a client that signs nothing, and sends a key in the place of a signature."""
    settings = Config(signature_version=UNSIGNED, retries={"max_attempts": 1})
    client = boto3.client(
        "sagemaker-runtime", endpoint_url=gateway.url, region_name="us-east-1", config=settings
    )

    def add_key(request: Any, **_: Any) -> None:
        request.headers["Authorization"] = f"Bearer {key}"

    client.meta.events.register("before-send.sagemaker-runtime", add_key)
    return client


def invoke(client: Any, endpoint: str, body: Any) -> Any:
    reply = client.invoke_endpoint(
        EndpointName=endpoint, ContentType="application/json", Body=json.dumps(body)
    )
    return json.load(reply["Body"])


def test_an_endpoint_is_a_model(gateway: Gateway) -> None:
    client = client_of(gateway, gateway.key)
    vectors = invoke(client, gateway.model, {"inputs": ["a car", "the sea"]})
    scores = invoke(
        client, gateway.model, {"inputs": {"source_sentence": "a car", "sentences": ["a car", "the sea"]}}
    )

    assert [DIMENSIONS] * 2 == [len(vector) for vector in vectors]
    assert [1.0, sum(a * b for a, b in zip(*vectors, strict=True))] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(("key", "endpoint", "status"), [("wrong", "any", 401), (None, "nowhere", 404)])
def test_errors_are_its_own(gateway: Gateway, key: str | None, endpoint: str, status: int) -> None:
    with pytest.raises(ClientError) as raised:
        invoke(client_of(gateway, key or gateway.key), endpoint, {"inputs": "a"})

    assert status == raised.value.response["ResponseMetadata"]["HTTPStatusCode"]
