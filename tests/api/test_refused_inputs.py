"""Refusals of one input: its place in the call, and the words that clients recognize."""

import json
from pathlib import Path

import pytest

from tests.conftest import Boots
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import respond_with
from tests.fakes.infinity import FakeInfinity
from tests.fakes.tei import FakeTei

# More tokens than the tokenizer's checkpoint allows.
LONG = "word " * 40
CONFIG = """
upstreams: {{only: {{backend: infinity, replicas: ["http://one"], tokenizer: {folder}, request_inputs: 1}}}}
models: {{m: {{upstream: only, truncate: error}}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return a config that refuses long inputs and sends each input by itself."""
    return CONFIG.format(folder=write_small_files(tmp_path))


async def test_names_the_input_by_its_place_in_the_call(boot: Boots, config: str) -> None:
    async with boot({"one": FakeInfinity()}, config) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": ["a", "b", LONG], "model": "m"})

    message = reply.json()["error"]["message"]
    assert 400 == reply.status_code
    assert message.startswith("input 2: This model's maximum context length is 16 tokens; this input has 42")


@pytest.mark.parametrize(
    ("path", "field", "element"),
    [
        # Elements that the decoder would refuse show that they are counted before it.
        ("/v1/embeddings", "input", [True, 2, 3]),
        ("/v1/embeddings", "input", {"a": 1}),
        ("/rerank", "texts", [1]),
        ("/v1/rerank", "documents", {"text": 1}),
        ("/embed", "inputs", [{}]),
    ],
)
async def test_too_many_inputs_are_refused_before_they_are_decoded(
    boot: Boots, config: str, path: str, field: str, element: object
) -> None:
    async with boot({"one": FakeInfinity()}, config) as gateway:
        reply = await gateway.post(path, {field: [element] * 20_000, "query": "q", "model": "m"})

    assert reply.status_code in {400, 422}
    assert "20000 inputs; this gateway takes 2048 in a call" in reply.text


async def test_passes_on_what_another_gateway_says_about_a_field(boot: Boots) -> None:
    message = "`dimensions` must be between 1 and 384, not 5000"
    server = FakeTei()
    error = {"message": message, "type": "invalid_request_error", "param": "dimensions", "code": None}
    models = "upstreams: {only: {backend: tei, replicas: ['http://one']}}\nmodels: {m: {upstream: only}}\n"
    async with boot({"one": server}, models) as gateway:
        server.hook = respond_with(400, json.dumps({"error": error}).encode())
        reply = await gateway.post("/v1/embeddings", {"input": ["a"], "model": "m", "dimensions": 5000})

    assert 400 == reply.status_code
    assert (message, "dimensions") == tuple(reply.json()["error"][key] for key in ("message", "param"))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"query": "a", "texts": ["x", LONG], "truncate": False}, "input 1: "),
        ({"query": LONG, "texts": ["x"], "truncate": False}, "the query: "),
    ],
)
async def test_scores_by_cosine_name_the_document(
    boot: Boots, config: str, body: dict[str, object], place: str
) -> None:
    async with boot({"one": FakeInfinity()}, config) as gateway:
        reply = await gateway.post("/models/m/rerank", body)

    assert 422 == reply.status_code
    assert reply.json()["error"].startswith(place)
