"""OpenAI's own client, synchronous and asynchronous."""

import base64
import json
import struct
import time
from typing import Any

import openai
import pytest
from openai.types import Batch, CreateEmbeddingResponse

from tests.clients.conftest import Gateway, Pictures

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    """Return a client, created as in its documentation."""
    return openai.OpenAI(api_key=gateway.key, base_url=f"{gateway.url}/v1", timeout=60)


def test_vectors_come_in_order_with_usage(client: openai.OpenAI, gateway: Gateway) -> None:
    reply = client.embeddings.create(model=gateway.model, input=TEXTS)

    singles = [client.embeddings.create(model=gateway.model, input=text) for text in TEXTS]
    assert [0, 1, 2] == [item.index for item in reply.data]
    for item, single in zip(reply.data, singles, strict=True):
        assert item.embedding == pytest.approx(single.data[0].embedding, abs=1e-3)
    assert sum(single.usage.total_tokens for single in singles) == reply.usage.total_tokens
    assert gateway.model == reply.model


async def test_async_client_gets_the_same_vectors(client: openai.OpenAI, gateway: Gateway) -> None:
    expected = client.embeddings.create(model=gateway.model, input=TEXTS)
    async with openai.AsyncOpenAI(api_key=gateway.key, base_url=f"{gateway.url}/v1") as async_client:
        reply = await async_client.embeddings.create(model=gateway.model, input=TEXTS)

    for item, async_item in zip(expected.data, reply.data, strict=True):
        assert item.embedding == pytest.approx(async_item.embedding, abs=1e-6)


def test_numbers_and_base64_are_the_same_vectors(client: openai.OpenAI, gateway: Gateway) -> None:
    def embedding(**options: Any) -> Any:
        return client.embeddings.create(model=gateway.model, input="an apple", **options).data[0].embedding

    default, numbers, encoded = (
        embedding(),
        embedding(encoding_format="float"),
        embedding(encoding_format="base64"),
    )
    decoded = struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(encoded))
    assert DIMENSIONS == len(default)
    assert default == pytest.approx(numbers, abs=1e-6)
    assert default == pytest.approx(decoded, abs=1e-6)


def test_fewer_dimensions_are_cut_and_normalized(client: openai.OpenAI, gateway: Gateway) -> None:
    whole = client.embeddings.create(model=gateway.model, input="an apple").data[0].embedding
    reply = client.embeddings.create(model=gateway.model, input="an apple", dimensions=64)

    length = sum(component * component for component in whole[:64]) ** 0.5
    assert [component / length for component in whole[:64]] == pytest.approx(
        reply.data[0].embedding, abs=1e-5
    )


def test_accepts_fields_of_other_servers_as_extras(client: openai.OpenAI, gateway: Gateway) -> None:
    extra = {"normalized": False, "input_type": "query"}
    reply = client.embeddings.create(model=gateway.prompted, input="an apple", extra_body=extra)

    plain = client.embeddings.create(model=gateway.prompted, input="an apple")
    assert plain.data[0].embedding != pytest.approx(reply.data[0].embedding, abs=1e-3)


def test_lists_and_retrieves_models(client: openai.OpenAI, gateway: Gateway) -> None:
    assert {gateway.model, gateway.prompted, gateway.cross} <= {model.id for model in client.models.list()}
    assert gateway.model == client.models.retrieve(gateway.model).id


REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
    (openai.NotFoundError, {"model": "nowhere", "input": "a"}, "model_not_found"),
    (openai.BadRequestError, {"input": []}, "empty_input"),
    (openai.BadRequestError, {"input": "a", "dimensions": 4096}, None),
    (openai.BadRequestError, {"model": "strict", "input": "word " * 1000}, None),
    (openai.BadRequestError, {"model": "cross", "input": "a"}, "model_not_supported"),
    (openai.BadRequestError, {"input": [[1, 2, 3]]}, None),
]


@pytest.mark.parametrize(("error", "options", "code"), REFUSED, ids=lambda value: str(value)[:30])
def test_errors_are_the_clients_own(
    client: openai.OpenAI,
    gateway: Gateway,
    error: type[openai.APIStatusError],
    options: Any,
    code: str | None,
) -> None:
    with pytest.raises(error) as raised:
        client.embeddings.create(**{"model": gateway.model, **options})

    assert (code, "invalid_request_error") == (raised.value.code, raised.value.type)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"]
    assert raised.value.request_id


def test_wrong_key_is_an_authentication_error(gateway: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        openai.OpenAI(api_key="wrong", base_url=f"{gateway.url}/v1").embeddings.create(
            model=gateway.model, input="a"
        )

    assert "invalid_api_key" == raised.value.code


def batch_lines(gateway: Gateway, bodies: list[dict[str, Any]]) -> bytes:
    """Return the input of a batch with a line for each body."""
    lines = [
        {
            "custom_id": f"id-{index}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": gateway.model} | body,
        }
        for index, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def begun(client: openai.OpenAI, content: bytes) -> Batch:
    """Upload an input and create its batch."""
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"night": "1"}
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Return a batch after its end."""
    while batch.status in {"validating", "in_progress", "finalizing", "cancelling"}:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results_of(client: openai.OpenAI, file: str | None) -> list[Any]:
    """Return the lines of a file of results."""
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def test_a_batch_has_results_and_errors(client: openai.OpenAI, gateway: Gateway) -> None:
    # The model has not as many dimensions as the last line asks for.
    bodies = [*({"input": text} for text in TEXTS), {"input": "a", "dimensions": 4096}]
    batch = ended(client, begun(client, batch_lines(gateway, bodies)))
    vectors = [item.embedding for item in client.embeddings.create(model=gateway.model, input=TEXTS).data]

    assert batch.request_counts is not None
    assert {"total": 4, "completed": 3, "failed": 1} == batch.request_counts.model_dump()
    assert ("completed", {"night": "1"}, None) == (batch.status, batch.metadata, batch.errors)
    results = results_of(client, batch.output_file_id)
    assert ["id-0", "id-1", "id-2"] == [result["custom_id"] for result in results]
    for expected, result in zip(vectors, results, strict=True):
        assert expected == pytest.approx(result["response"]["body"]["data"][0]["embedding"], abs=1e-3)
    [error] = results_of(client, batch.error_file_id)
    assert ("id-3", 400) == (error["custom_id"], error["response"]["status_code"])
    assert error["response"]["request_id"]
    assert batch.id in [found.id for found in client.batches.list(limit=1)]
    assert batch.input_file_id in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_a_cancelled_batch_keeps_its_results(client: openai.OpenAI, gateway: Gateway) -> None:
    batch = begun(client, batch_lines(gateway, [{"input": "an apple"}] * 20_000))
    assert "cancelling" == client.batches.cancel(batch.id).status
    batch = ended(client, batch)

    assert batch.request_counts is not None
    assert "cancelled" == batch.status
    assert 20_000 == batch.request_counts.completed + batch.request_counts.failed
    assert {"batch_cancelled"} == {line["error"]["code"] for line in results_of(client, batch.error_file_id)}


class ObservedClient:
    """A client with a key, the responses it receives, and the sleeps it would have made."""

    def __init__(self, gateway: Gateway, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.responses: list[Any] = []
        self.slept_s: list[float] = []
        monkeypatch.setattr("openai._base_client.time.sleep", self.slept_s.append)
        self.model = gateway.model
        http_client = openai.DefaultHttpxClient(event_hooks={"response": [self.responses.append]})
        self.client = openai.OpenAI(api_key=key, base_url=f"{gateway.url}/v1", http_client=http_client)

    def exhaust_limit(self) -> openai.RateLimitError:
        """Return the error that the client raises once its limit is exhausted."""
        with pytest.raises(openai.RateLimitError) as raised:
            self.call_twice()
        return raised.value

    def call_twice(self) -> None:
        """Call once more than the limit allows."""
        for _ in range(2):
            self.client.embeddings.create(model=self.model, input="a")


def test_retries_an_exhausted_rate_after_retry_after(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = ObservedClient(gateway, gateway.slow, monkeypatch)

    assert "rate_limit_exceeded" == observed.exhaust_limit().code
    refusals = [response for response in observed.responses if response.status_code == 429]
    retry_after_s = [float(response.headers["retry-after"]) for response in refusals]
    assert 3 == len(retry_after_s)
    assert retry_after_s[:2] == observed.slept_s
    assert all(0 < seconds <= 60 for seconds in retry_after_s)


def test_does_not_retry_an_exhausted_day_quota(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    observed = ObservedClient(gateway, gateway.spent, monkeypatch)

    assert "insufficient_quota" == observed.exhaust_limit().code
    assert [] == observed.slept_s


def azure(gateway: Gateway, **options: Any) -> openai.AzureOpenAI:
    """Return Azure's client, which sends its key in the header `api-key`."""
    settings = {"api_key": gateway.key, "api_version": "2024-10-21", "max_retries": 0} | options
    return openai.AzureOpenAI(azure_endpoint=gateway.url, **settings)


@pytest.mark.parametrize("deployment", [None, "org/prompted"])
def test_azures_client_gets_the_same_vectors(
    client: openai.OpenAI, gateway: Gateway, deployment: str | None
) -> None:
    reply = azure(gateway, azure_deployment=deployment).embeddings.create(model=gateway.prompted, input=TEXTS)

    expected = client.embeddings.create(model=gateway.prompted, input=TEXTS)
    assert gateway.prompted == reply.model
    for item, azures in zip(expected.data, reply.data, strict=True):
        assert item.embedding == pytest.approx(azures.embedding, abs=1e-6)


def test_azures_client_lists_models_and_raises_its_errors(gateway: Gateway) -> None:
    assert gateway.model in [model.id for model in azure(gateway).models.list()]
    with pytest.raises(openai.NotFoundError) as raised:
        azure(gateway).embeddings.create(model="nowhere", input="a")
    assert "model_not_found" == raised.value.code
    with pytest.raises(openai.AuthenticationError):
        azure(gateway, api_key="wrong").embeddings.create(model=gateway.model, input="a")


def test_version_1_of_azure_takes_openais_own_client(gateway: Gateway) -> None:
    latest = openai.OpenAI(api_key=gateway.key, base_url=f"{gateway.url}/openai/v1/")

    assert DIMENSIONS == len(latest.embeddings.create(model=gateway.model, input="a").data[0].embedding)
    assert gateway.model in [model.id for model in latest.models.list()]


def test_messages_with_a_picture_have_its_vector(
    client: openai.OpenAI, gateway: Gateway, pictures: Pictures
) -> None:
    found = []
    for uri in pictures.uris:
        content = [{"type": "image_url", "image_url": {"url": uri}}]
        extra = {"messages": [{"role": "user", "content": content}]}
        # vLLM's documented call: the client insists on an input, and its body has messages instead.
        reply = client.post(
            "/embeddings", cast_to=CreateEmbeddingResponse, body={"model": gateway.clip} | extra
        )
        found.append(reply.data[0].embedding)

    pictures.assert_equal(found)


def test_input_takes_pictures_in_jinas_form(
    client: openai.OpenAI, gateway: Gateway, pictures: Pictures
) -> None:
    items: Any = [{"image": uri} for uri in pictures.uris]
    reply = client.embeddings.create(model=gateway.clip, input=items)

    pictures.assert_equal([item.embedding for item in reply.data])
