"""Xinference's own client, on which Dify's and LangChain's classes are built."""

from typing import Any

import pytest
from xinference_client import RESTfulClient

from tests.clients.conftest import Gateway

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384


def connect(gateway: Gateway, key: str | None = None) -> Any:
    return RESTfulClient(gateway.url, api_key=key or gateway.key)


def test_models_have_their_types(gateway: Gateway) -> None:
    types = {name: model.get("model_type") for name, model in connect(gateway).list_models().items()}

    assert ("embedding", "rerank") == (types[gateway.model], types[gateway.cross])


def test_embeds_with_usage(gateway: Gateway) -> None:
    model = connect(gateway).get_model(gateway.model)
    reply = model.create_embedding(DOCUMENTS)

    assert [DIMENSIONS] * 4 == [len(item["embedding"]) for item in reply["data"]]
    assert reply["usage"]["total_tokens"] > 8


def test_ranks_with_documents_and_tokens(gateway: Gateway) -> None:
    model = connect(gateway).get_model(gateway.cross)
    reply = model.rerank(DOCUMENTS, "fruit", top_n=2, return_documents=True, return_len=True, user="ann")

    assert 2 == len(reply["results"])
    assert all(DOCUMENTS[item["index"]] == item["document"]["text"] for item in reply["results"])
    assert reply["meta"]["tokens"]["input_tokens"] > 8


def test_chunks_are_answered_with_a_warning(gateway: Gateway) -> None:
    reply = connect(gateway).get_model(gateway.cross).rerank(DOCUMENTS, "fruit", max_chunks_per_doc=10)

    assert len(DOCUMENTS) == len(reply["results"])
    (warning,) = reply["meta"]["warnings"]
    assert "`max_chunks_per_doc`" in warning


@pytest.mark.parametrize(("key", "reason"), [(None, "no model"), ("wrong", "Incorrect API key")])
def test_errors_have_their_reason(gateway: Gateway, key: str | None, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        connect(gateway, key).get_model("nowhere")
