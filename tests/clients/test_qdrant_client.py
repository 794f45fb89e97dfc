"""Qdrant's inference protocol: its client's types, sent as its server does, by the same HTTP library.

A Qdrant server turns a `Document`, `Image` or `InferenceObject` into an input, and posts all inputs of a call
with reqwest.
"""

import json
import math
import random
from typing import Any

import pytest
from pyreqwest.client import SyncClientBuilder
from qdrant_client.models import Document, Image, InferenceObject, SparseVector

from tests.clients.conftest import Gateway, Pictures

Inferred = Document | Image | InferenceObject
TEXTS = [
    f"{subject} {verb}"
    for subject in ("a panda", "a car", "the sea")
    for verb in ("eats", "moves", "is blue")
]
MIXTURES = 25


def written(item: Inferred) -> dict[str, Any]:
    """Return an input as Qdrant writes it."""
    if isinstance(item, Document):
        data, kind = item.text, "text"
    elif isinstance(item, Image):
        data, kind = item.image, "image"
    else:
        data, kind = item.object, "object"
    return {"data": data, "data_type": kind, "model": item.model, "options": item.options}


class Server:
    """The part of a Qdrant server that calls `inference.address`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.token = token

    def infer(self, items: list[Inferred], inference: str = "update") -> tuple[int, Any]:
        """Return the status and the reply to the inputs of one call."""
        body = {"inputs": [written(item) for item in items], "inference": inference, "token": self.token}
        with SyncClientBuilder().build() as client:
            reply = client.post(self.address).body_json(body).build().send()
            return reply.status, json.loads(reply.bytes().to_bytes())

    def vectors(self, items: list[Inferred], inference: str = "update") -> list[Any]:
        """Return the vectors of a successful call."""
        status, reply = self.infer(items, inference)
        assert 200 == status, reply
        assert len(items) == len(reply["embeddings"])
        return list(reply["embeddings"])


@pytest.fixture
def server(gateway: Gateway) -> Server:
    """Return a server whose configured address has the key."""
    return Server(gateway.url.replace("//", f"//:{gateway.key}@") + "/qdrant")


def test_texts_pictures_and_objects_of_several_models(
    server: Server, gateway: Gateway, pictures: Pictures
) -> None:
    inputs: list[Inferred] = [
        Document(text=TEXTS[0], model=gateway.model),
        Image(image=pictures.uris[0], model=gateway.clip),
        InferenceObject(object={"image": pictures.uris[1].partition(",")[2]}, model=gateway.clip),
        Document(text=TEXTS[0], model=gateway.model, options={"dimensions": 64}),
    ]
    text, first, second, cut = server.vectors(inputs)

    pictures.assert_equal([first, second])
    assert (384, 64) == (len(text), len(cut))
    scale = math.hypot(*text[:64])
    assert cut == pytest.approx([number / scale for number in text[:64]], abs=1e-5)


def test_updates_are_documents_and_searches_queries(server: Server, gateway: Gateway) -> None:
    document = [Document(text="a panda", model=gateway.prompted)]
    stored, asked = server.vectors(document), server.vectors(document, "search")
    plain = [Document(text=f"{prompt}: a panda", model=gateway.model) for prompt in ("passage", "query")]

    for found, expected in zip((stored[0], asked[0]), server.vectors(plain), strict=True):
        assert expected == pytest.approx(found, abs=1e-5)


def test_random_mixtures_equal_single_inputs(server: Server, gateway: Gateway, pictures: Pictures) -> None:
    draw, known = random.Random(7), {}
    models = [gateway.model, gateway.prompted, gateway.clip]
    for _ in range(MIXTURES):
        items: list[Inferred] = [
            Document(text=draw.choice(TEXTS), model=draw.choice(models)) for _ in range(draw.randint(1, 12))
        ]
        items += [
            Image(image=draw.choice(pictures.uris), model=gateway.clip) for _ in range(draw.randint(0, 2))
        ]
        draw.shuffle(items)
        for item, vector in zip(items, server.vectors(items), strict=True):
            place = repr(item)
            if place not in known:
                (known[place],) = server.vectors([item])
            assert known[place] == pytest.approx(vector, abs=2e-3)


def test_a_sparse_vector_fits_the_clients_type(server: Server, gateway: Gateway) -> None:
    """No model of this gateway is sparse: the refusal is one text, and the type is that of replies."""
    status, reply = server.infer([Document(text="a", model=gateway.model, options={"output_type": "sparse"})])

    assert (400, ["error"]) == (status, list(reply))
    assert "sparse" in reply["error"]
    assert {"indices", "values"} == SparseVector.model_fields.keys()


def test_the_token_is_the_key_of_a_small_body(gateway: Gateway) -> None:
    address = f"{gateway.url}/qdrant"
    small: list[Inferred] = [Document(text="a", model=gateway.model)]
    large: list[Inferred] = [
        Document(text=f"{'w ' * 100}{index}", model=gateway.model) for index in range(400)
    ]

    assert 200 == Server(address, gateway.key).infer(small)[0]
    for server, items, expected in (
        (Server(address), small, 401),
        (Server(address, "no-key"), small, 401),
        (Server(address, gateway.key), large, 413),
    ):
        status, reply = server.infer(items)
        assert (expected, ["error"]) == (status, list(reply))


def test_an_unknown_option_and_model_are_named(server: Server, gateway: Gateway) -> None:
    option = server.infer([Document(text="a", model=gateway.model, options={"dimension": 64})])
    model = server.infer([Document(text="a", model="nowhere")])

    assert 400 == option[0]
    assert "`dimension`" in option[1]["error"]
    assert 404 == model[0]
    assert "'nowhere'" in model[1]["error"]
