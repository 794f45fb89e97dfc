"""OpenAI's own client, waiting and not waiting."""

import base64
import struct
from typing import Any

import openai
import pytest

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    """As its documentation makes one."""
    return openai.OpenAI(api_key=gateway.key, base_url=f"{gateway.url}/v1", timeout=60)


def test_vectors_come_in_order_with_usage(client: openai.OpenAI, gateway: Gateway) -> None:
    reply = client.embeddings.create(model=gateway.model, input=TEXTS)

    alone = [client.embeddings.create(model=gateway.model, input=text) for text in TEXTS]
    assert [0, 1, 2] == [one.index for one in reply.data]
    for one, other in zip(reply.data, alone, strict=True):
        assert one.embedding == pytest.approx(other.data[0].embedding, abs=1e-3)
    assert sum(one.usage.total_tokens for one in alone) == reply.usage.total_tokens
    assert gateway.model == reply.model


async def test_async_client_gets_the_same_vectors(client: openai.OpenAI, gateway: Gateway) -> None:
    expected = client.embeddings.create(model=gateway.model, input=TEXTS)
    async with openai.AsyncOpenAI(api_key=gateway.key, base_url=f"{gateway.url}/v1") as other:
        reply = await other.embeddings.create(model=gateway.model, input=TEXTS)

    for one, two in zip(expected.data, reply.data, strict=True):
        assert one.embedding == pytest.approx(two.embedding, abs=1e-6)


def test_numbers_and_base64_are_the_same_vectors(client: openai.OpenAI, gateway: Gateway) -> None:
    def embedding(**asked: Any) -> Any:
        return client.embeddings.create(model=gateway.model, input="an apple", **asked).data[0].embedding

    silent, numbers, packed = (
        embedding(),
        embedding(encoding_format="float"),
        embedding(encoding_format="base64"),
    )
    unpacked = struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(packed))
    assert DIMENSIONS == len(silent)
    assert silent == pytest.approx(numbers, abs=1e-6)
    assert silent == pytest.approx(unpacked, abs=1e-6)


def test_fewer_dimensions_are_cut_and_normalized(client: openai.OpenAI, gateway: Gateway) -> None:
    whole = client.embeddings.create(model=gateway.model, input="an apple").data[0].embedding
    reply = client.embeddings.create(model=gateway.model, input="an apple", dimensions=64)

    length = sum(one * one for one in whole[:64]) ** 0.5
    assert [one / length for one in whole[:64]] == pytest.approx(reply.data[0].embedding, abs=1e-5)


def test_accepts_fields_of_other_servers_as_extras(client: openai.OpenAI, gateway: Gateway) -> None:
    extra = {"normalized": False, "input_type": "query"}
    reply = client.embeddings.create(model=gateway.prompted, input="an apple", extra_body=extra)

    plain = client.embeddings.create(model=gateway.prompted, input="an apple")
    assert plain.data[0].embedding != pytest.approx(reply.data[0].embedding, abs=1e-3)


def test_lists_and_retrieves_models(client: openai.OpenAI, gateway: Gateway) -> None:
    assert {gateway.model, gateway.prompted, gateway.cross} <= {one.id for one in client.models.list()}
    assert gateway.model == client.models.retrieve(gateway.model).id


REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
    (openai.NotFoundError, {"model": "nowhere", "input": "a"}, "model_not_found"),
    (openai.BadRequestError, {"input": []}, "empty_input"),
    (openai.BadRequestError, {"input": "a", "dimensions": 4096}, None),
    (openai.BadRequestError, {"model": "strict", "input": "word " * 1000}, None),
    (openai.BadRequestError, {"model": "cross", "input": "a"}, "model_not_supported"),
    (openai.BadRequestError, {"input": [[1, 2, 3]]}, None),
]


@pytest.mark.parametrize(("error", "asked", "code"), REFUSED, ids=lambda one: str(one)[:30])
def test_errors_are_the_clients_own(
    client: openai.OpenAI, gateway: Gateway, error: type[openai.APIStatusError], asked: Any, code: str | None
) -> None:
    with pytest.raises(error) as raised:
        client.embeddings.create(**{"model": gateway.model, **asked})

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


class Watched:
    """A client with this key, the answers that it gets, and how long it would have slept after each."""

    def __init__(self, gateway: Gateway, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Any] = []
        self.slept_s: list[float] = []
        monkeypatch.setattr("openai._base_client.time.sleep", self.slept_s.append)
        self.model = gateway.model
        door = openai.DefaultHttpxClient(event_hooks={"response": [self.answers.append]})
        self.client = openai.OpenAI(api_key=key, base_url=f"{gateway.url}/v1", http_client=door)

    def refused(self) -> openai.RateLimitError:
        """What it raises once its limit is used up."""
        with pytest.raises(openai.RateLimitError) as raised:
            self.call_twice()
        return raised.value

    def call_twice(self) -> None:
        """Once more than it may."""
        for _ in range(2):
            self.client.embeddings.create(model=self.model, input="a")


def test_retries_an_exhausted_rate_after_retry_after(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(gateway, gateway.slow, monkeypatch)

    assert "rate_limit_exceeded" == watched.refused().code
    refusals = [one for one in watched.answers if one.status_code == 429]
    told_s = [float(one.headers["retry-after"]) for one in refusals]
    assert 3 == len(told_s)
    assert told_s[:2] == watched.slept_s
    assert all(0 < one <= 60 for one in told_s)


def test_does_not_retry_an_exhausted_day_quota(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(gateway, gateway.spent, monkeypatch)

    assert "insufficient_quota" == watched.refused().code
    assert [] == watched.slept_s
