"""Qdrant's protocol before engines: a model of three kinds of vectors, and one of texts and pictures."""

import base64
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Running, running_gateway
from tests.engine.checkpoints import make_m3
from tests.engine.dual_checkpoints import make_dual
from tests.engine.engines import TEXTS, EngineInProcess, load_tiny
from tests.pictures import encoded, noise

CONFIG = """
upstreams:
  m3: {backend: torch, model: m3, dtype: float32}
  clip: {backend: torch, model: clip, dtype: float32}
models: {m3: {upstream: m3}, clip: {upstream: clip}}
"""
PICTURES = [base64.b64encode(encoded(noise(40 + seed, 30, seed), "PNG")).decode() for seed in range(3)]
OUTPUTS = ("dense", "sparse", "multivector")
MIXTURES = 12


@pytest.fixture
async def gateway(minilm: Path, tmp_path: Path) -> AsyncIterator[Running]:
    """Boot a gateway before both engines."""
    m3, _ = make_m3(minilm, tmp_path)
    make_dual("clip", minilm, tmp_path / "clip")
    engines = {"m3": EngineInProcess(load_tiny(m3)), "clip": EngineInProcess(load_tiny(tmp_path / "clip"))}
    async with running_gateway({}, CONFIG, engines=engines) as running:
        yield running


async def inferred(gateway: Running, inputs: list[dict[str, Any]]) -> list[Any]:
    """Return the embeddings of a request."""
    reply = await gateway.post("/qdrant", {"inputs": inputs, "inference": "update", "token": None})
    assert 200 == reply.status_code, reply.text
    return list(reply.json()["embeddings"])


async def references(gateway: Running) -> dict[tuple[str, str, str], Any]:
    """Return the vector of each input by model, kind of vector and data, from other dialects."""
    body = {"items": [{"text": text} for text in TEXTS], "params": {"output_types": list(OUTPUTS)}}
    items = (await gateway.post("/v1/encode/m3", body)).json()["items"]
    found: dict[tuple[str, str, str], Any] = {}
    for text, item in zip(TEXTS, items, strict=True):
        terms = item["sparse"]
        found["m3", "sparse", text] = dict(zip(terms["indices"], terms["values"], strict=True))
        found |= {("m3", kind, text): item[kind]["values"] for kind in ("dense", "multivector")}
    inputs: list[Any] = [*TEXTS, *[{"image": picture} for picture in PICTURES]]
    data = (await gateway.post("/v1/embeddings", {"model": "clip", "input": inputs})).json()["data"]
    return found | {
        ("clip", "dense", each): item["embedding"]
        for each, item in zip((*TEXTS, *PICTURES), data, strict=True)
    }


async def test_random_mixtures_equal_other_dialects(gateway: Running) -> None:
    draw, expected = random.Random(20_261_129), await references(gateway)
    for _ in range(MIXTURES):
        places = draw.sample(sorted(expected), k=draw.randint(1, 12))
        inputs = [
            {
                "data": data,
                "data_type": "image" if data in PICTURES else "text",
                "model": model,
                # The dense vector is the default of a model of several kinds.
                "options": None if kind == "dense" and draw.random() < 0.5 else {"output_type": kind},
            }
            for model, kind, data in places
        ]
        for place, vector in zip(places, await inferred(gateway, inputs), strict=True):
            if isinstance(vector, dict):
                found = dict(zip(vector["indices"], vector["values"], strict=True))
                assert pytest.approx(expected[place], abs=1e-5) == found
            else:
                np.testing.assert_allclose(expected[place], vector, atol=1e-5)


async def test_weaviates_containers_give_the_same_vectors(gateway: Running) -> None:
    expected = await references(gateway)
    alone = (await gateway.post("/models/m3/vectors", {"text": TEXTS[0]})).json()
    several = (await gateway.post("/models/m3/vectors", {"texts": TEXTS})).json()
    both = (await gateway.post("/models/clip/vectorize", {"texts": TEXTS, "images": PICTURES})).json()

    dense = [expected["m3", "dense", text] for text in TEXTS]
    np.testing.assert_allclose(dense, several["vectors"], atol=1e-5)
    np.testing.assert_allclose(dense[0], alone["vector"], atol=1e-5)
    for kind, inputs in (("textVectors", TEXTS), ("imageVectors", PICTURES)):
        known = [expected["clip", "dense", each] for each in inputs]
        np.testing.assert_allclose(known, both[kind], atol=1e-5)
