"""The curl examples of TEI's documentation, sent unchanged to a path that names the model."""

from typing import Any

import httpx
import pytest

from tests.clients.conftest import Gateway

DEEP = "What is Deep Learning?"


@pytest.fixture
def client(gateway: Gateway) -> httpx.Client:
    """Return a client with the headers of the examples. The model is in each path."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {gateway.key}"}
    return httpx.Client(base_url=f"{gateway.url}/models/", headers=headers, timeout=60)


def post(client: httpx.Client, model: str, route: str, body: str) -> Any:
    """Return the reply to a body of text, which curl sends as is."""
    reply = client.post(f"{model}{route}", content=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_embed_accepts_one_text_or_many(client: httpx.Client, gateway: Gateway) -> None:
    (single,) = post(client, gateway.model, "/embed", '{"inputs":"What is Deep Learning?"}')
    many = post(client, gateway.model, "/embed", '{"inputs":["Today is a nice day", "I like you"]}')

    assert [384, 384, 384] == [len(row) for row in (single, *many)]


def test_rerank_puts_the_best_text_first(client: httpx.Client, gateway: Gateway) -> None:
    body = '{"query":"What is Deep Learning?", "texts": ["Deep Learning is not...", "Deep learning is..."]}'
    ranks = post(client, gateway.cross, "/rerank", body)

    assert {0, 1} == {rank["index"] for rank in ranks}
    assert ranks[0]["score"] >= ranks[1]["score"]


def test_predict_accepts_one_text_a_pair_and_many(client: httpx.Client, gateway: Gateway) -> None:
    single = post(client, gateway.labels, "/predict", '{"inputs":"I like you."}')
    pair = post(client, gateway.labels, "/predict", '{"inputs":["I like you.", "I hate pineapples"]}')
    many = post(client, gateway.labels, "/predict", '{"inputs":[["I like you."], ["I hate pineapples"]]}')

    names = {"joy", "anger", "fear"}
    assert names == {label["label"] for label in single} == {label["label"] for label in pair}
    assert [single[0]["label"], 2] == [many[0][0]["label"], len(many)]


def test_similarity_is_higher_for_related_sentences(client: httpx.Client, gateway: Gateway) -> None:
    inputs = '{"source_sentence":"What is Deep Learning?","sentences":["What is Machine Learning?","pears"]}'
    near, far = post(client, gateway.model, "/similarity", f'{{"inputs":{inputs}}}')

    assert near > far


def test_decode_reverses_tokenize(client: httpx.Client, gateway: Gateway) -> None:
    (tokens,) = post(client, gateway.model, "/tokenize", '{"inputs":"What is Deep Learning?"}')
    ids = [token["id"] for token in tokens]
    texts = client.post(f"{gateway.model}/decode", json={"ids": ids, "skip_special_tokens": True}).json()

    assert [DEEP.lower()] == texts
    assert [tokens[0]["special"], tokens[1]["special"]] == [True, False]


def test_openais_route_accepts_teis_example(client: httpx.Client, gateway: Gateway) -> None:
    body = '{"model":"text-embeddings-inference","input":"What is Deep Learning?","user":"null"}'
    reply = post(client, gateway.model, "/v1/embeddings", body)

    assert (1, 384) == (len(reply["data"]), len(reply["data"][0]["embedding"]))


@pytest.mark.parametrize(
    ("model", "kind"),
    [("all-minilm-l6-v2", "embedding"), ("cross", "reranker"), ("labels", "classifier")],
)
def test_info_shows_the_kind_of_model(client: httpx.Client, model: str, kind: str) -> None:
    facts = client.get(f"{model}/info").json()

    assert kind in facts["model_type"]
    assert 200 == client.get(f"{model}/health").status_code


def test_classifier_rejects_embed(client: httpx.Client, gateway: Gateway) -> None:
    reply = client.post(f"{gateway.labels}/embed", content='{"inputs":"a"}')

    assert (424, "Backend") == (reply.status_code, reply.json()["error_type"])
