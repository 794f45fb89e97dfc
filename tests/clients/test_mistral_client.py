"""Mistral's own client."""

from typing import Any

import pytest
from mistralai.client import Mistral
from mistralai.client.errors import SDKError

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


def connect(gateway: Gateway, key: str | None = None) -> Any:
    return Mistral(api_key=key or gateway.key, server_url=gateway.url)


def test_embeds_in_order_with_usage(gateway: Gateway) -> None:
    client = connect(gateway)
    reply = client.embeddings.create(model=gateway.model, inputs=TEXTS)

    singles = [client.embeddings.create(model=gateway.model, inputs=text) for text in TEXTS]
    for item, single in zip(reply.data, singles, strict=True):
        assert item.embedding == pytest.approx(single.data[0].embedding, abs=1e-3)
    assert sum(single.usage.total_tokens for single in singles) == reply.usage.total_tokens
    assert 0 == reply.usage.completion_tokens
    assert len({reply.id, *(single.id for single in singles)}) == 4


async def test_embeds_without_blocking(gateway: Gateway) -> None:
    reply = await connect(gateway).embeddings.create_async(model=gateway.model, inputs=TEXTS)

    assert [DIMENSIONS] * 3 == [len(item.embedding) for item in reply.data]


@pytest.mark.parametrize(("kind", "length"), [("float", 64), ("int8", 64), ("uint8", 64), ("binary", 8)])
def test_returns_every_type_in_its_size(gateway: Gateway, kind: str, length: int) -> None:
    options = {"output_dtype": kind, "output_dimension": 64}
    reply = connect(gateway).embeddings.create(model=gateway.model, inputs=TEXTS, **options)

    assert [length] * 3 == [len(item.embedding) for item in reply.data]


def test_lists_models_with_their_length(gateway: Gateway) -> None:
    models = {model.id: model for model in connect(gateway).models.list().data}

    assert {"base"} == {model.type for model in models.values()}
    assert (256, 512) == (
        models[gateway.model].max_context_length,
        models[gateway.cross].max_context_length,
    )
    assert models[gateway.clip].capabilities.vision
    assert gateway.prompted == connect(gateway).models.retrieve(model_id=gateway.prompted).id


@pytest.mark.parametrize(
    ("key", "model", "status"), [(None, "nowhere", 404), ("wrong", "all-minilm-l6-v2", 401)]
)
def test_errors_have_their_status_and_reason(
    gateway: Gateway, key: str | None, model: str, status: int
) -> None:
    with pytest.raises(SDKError) as raised:
        connect(gateway, key).embeddings.create(model=model, inputs=TEXTS)

    assert status == raised.value.status_code
    assert "message" in raised.value.body
