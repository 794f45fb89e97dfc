"""Tests of real servers with images and sound: the gateway returns the vectors that the server does."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from backends.contract import Vectors
from tests.conftest import running_gateway
from tests.engine.sounds import recorded, tone
from tests.pictures import encoded, noise
from tests.real.media_models import make_clap, make_clip, make_reranker
from tests.real.servers import HOME, Server, serve_model

# A server starts inside the first test that uses it.
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

CONFIG = """
upstreams: {one: {backend: SERVER, replicas: ["URL"], tokenizer: MODEL}}
models: {one: {upstream: one}}
"""
PICTURES = [
    f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(noise(40 + 9 * i, 50, i), kind)).decode()}"
    for i, kind in enumerate(("PNG", "JPEG", "WEBP"))
]
SOUNDS = [
    f"data:audio/wav;base64,{base64.b64encode(recorded(tone(0.3 + 0.2 * i, rate, seed=i), rate)).decode()}"
    for i, rate in enumerate((48_000, 48_000, 16_000))
]
TOLERANCE = 1e-5
TEXTS = ["a car", "an apple in the sea"]


class Running(NamedTuple):
    """Server of one model."""

    server: Server
    url: str
    model: Path

    def config(self) -> str:
        """Return the gateway's configuration."""
        names = {"SERVER": self.server, "URL": self.url, "MODEL": str(self.model)}
        config = CONFIG
        for name, value in names.items():
            config = config.replace(name, value)
        return config

    def vectors(self, inputs: list[str], modality: str = "text") -> Vectors:
        """Return the server's own vectors."""
        if self.server == "vllm" and modality != "text":
            return np.concatenate([self._vectors_of_message(uri) for uri in inputs])
        body: dict[str, Any] = {"model": self.model.name, "input": inputs}
        if self.server == "infinity":
            body["modality"] = modality
        reply = httpx.post(
            f"{self.url}{'/v1' if self.server == 'vllm' else ''}/embeddings",
            json=body,
            timeout=120.0,
        )
        return vectors_of(reply)

    def scores(self, body: dict[str, Any]) -> list[float]:
        """Return the server's own scores."""
        return scores_of(httpx.post(f"{self.url}/v1/rerank", json=body, timeout=120.0))

    def _vectors_of_message(self, uri: str) -> Vectors:
        """Return the vector of a picture, of which vLLM takes one in a request."""
        body = {"model": self.model.name, "messages": [message(uri)]}
        return vectors_of(httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=120.0))


def message(uri: str) -> dict[str, Any]:
    """Return a message that is one picture."""
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}


def vectors_of(reply: httpx.Response) -> Vectors:
    """Return the vectors of a reply in OpenAI's form, of length 1."""
    assert 200 == reply.status_code, reply.text
    rows = np.array([item["embedding"] for item in reply.json()["data"]], np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def run_model(server: Server, make: Callable[[Path], Path], flags: tuple[str, ...] = ()) -> Iterator[Running]:
    """Run a server of one model, which is written first."""
    model = HOME / "models" / make.__name__.removeprefix("make_")
    if not (model / "model.safetensors").exists():
        make(model)
    with serve_model(server, model, flags) as url:
        yield Running(server, url, model)


@pytest.fixture(scope="module", params=["infinity", "vllm"])
def clip(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Run a server of a small CLIP."""
    server: Server = request.param
    # The default of this project's vLLM is bfloat16.
    yield from run_model(server, make_clip, ("--dtype", "float32") if server == "vllm" else ())


@pytest.fixture(scope="module")
def clap() -> Iterator[Running]:
    """Run an Infinity of a small CLAP."""
    yield from run_model("infinity", make_clap)


@pytest.fixture(scope="module")
def reranker() -> Iterator[Running]:
    """Run a vLLM of a small reranker that reads pictures."""
    yield from run_model("vllm", make_reranker, ("--dtype", "float32", "--enforce-eager"))


@pytest.mark.parametrize("raw", [True, False])
async def test_pairs_with_pictures_have_the_scores_of_the_server(reranker: Running, raw: bool) -> None:
    picture, other, third = ({"content": message(uri)["content"]} for uri in PICTURES)
    both = {"content": [*other["content"], {"type": "text", "text": TEXTS[1]}]}
    documents = [TEXTS[0], picture, both, {"content": [*third["content"], *other["content"]]}, picture]
    async with running_gateway({}, reranker.config(), sockets=True) as gateway:
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]
        assert "rerank_image" in model["operations"]
        for query in (TEXTS[0], other, both):
            body = {"model": reranker.model.name, "query": query, "documents": documents}
            body |= {"use_activation": False} if raw else {}
            scores = scores_of(await gateway.post("/v1/rerank", body | {"model": "one"}))
            np.testing.assert_allclose(reranker.scores(body), scores, atol=TOLERANCE)
            assert np.ptp(scores) > 1e-3


def scores_of(reply: httpx.Response) -> list[float]:
    """Return the scores of a rerank's reply in the order of the documents."""
    assert 200 == reply.status_code, reply.text
    return [item["relevance_score"] for item in sorted(reply.json()["results"], key=lambda r: r["index"])]


async def test_pictures_and_texts_have_the_vectors_of_the_server(clip: Running) -> None:
    async with running_gateway({}, clip.config(), sockets=True) as gateway:
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]
        assert "embed_image" in model["operations"]
        pictures = await gateway.post("/v1/embeddings", {"input": [{"image": uri} for uri in PICTURES]})
        texts = await gateway.post("/v1/embeddings", {"input": TEXTS})
        mixed = await gateway.post("/v1/embeddings", {"input": [{"image": PICTURES[1]}, TEXTS[0]]})
        single = await gateway.post("/v1/embeddings", {"messages": [message(PICTURES[0])]})

    found = vectors_of(pictures)
    np.testing.assert_allclose(clip.vectors(PICTURES, "image"), found, atol=TOLERANCE)
    np.testing.assert_allclose(clip.vectors(TEXTS), vectors_of(texts), atol=TOLERANCE)
    expected = [found[1], vectors_of(texts)[0], found[0]]
    actual = [*vectors_of(mixed), *vectors_of(single)]
    np.testing.assert_allclose(expected, actual, atol=TOLERANCE)
    assert np.abs(found[0] - found[1]).max() > 0.05


async def test_recordings_and_texts_have_the_vectors_of_the_server(clap: Running) -> None:
    async with running_gateway({}, clap.config(), sockets=True) as gateway:
        sounds = await gateway.post("/v1/embeddings", {"input": [{"audio": uri} for uri in SOUNDS[:2]]})
        texts = await gateway.post("/v1/embeddings", {"input": TEXTS})
        # Infinity resamples nothing.
        other_rate = await gateway.post("/v1/embeddings", {"input": [{"audio": SOUNDS[2]}]})

    np.testing.assert_allclose(clap.vectors(SOUNDS[:2], "audio"), vectors_of(sounds), atol=TOLERANCE)
    np.testing.assert_allclose(clap.vectors(TEXTS), vectors_of(texts), atol=TOLERANCE)
    assert np.abs(np.subtract(*vectors_of(sounds))).max() > 0.05
    assert 400 == other_rate.status_code, other_rate.text
    assert "48000Hz" in other_rate.text
