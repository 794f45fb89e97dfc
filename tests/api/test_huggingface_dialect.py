"""Hugging Face's paths of tasks, and those of Amazon SageMaker's clients."""

from typing import Any

import numpy as np
import pytest

from tests.conftest import Boots, posted
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import vector_of

SIMILARITY = {"source_sentence": "a b", "sentences": ["a b", "c"]}


@pytest.mark.parametrize("prefix", ["", "/hf-inference"])
@pytest.mark.parametrize("model", ["bge", "org/bge", "org%2Fbge"])
@pytest.mark.parametrize("inputs", [["red", "blue"], "red"])
async def test_features_are_one_vector_for_each_text(
    boot: Boots, prefix: str, model: str, inputs: Any
) -> None:
    body = {"inputs": inputs, "options": {"wait_for_model": True}, "truncation_direction": "Right"}
    async with boot(fakes()) as gateway:
        reply = await gateway.post(f"{prefix}/models/{model}/pipeline/feature-extraction", body)
        event = gateway.events[-1]

    texts = [inputs] if isinstance(inputs, str) else inputs
    np.testing.assert_allclose([vector_of(text) for text in texts], reply.json(), rtol=1e-6)
    assert "x-ignored-fields" not in reply.headers
    assert f"{prefix}/models/{{model}}/pipeline/feature-extraction" == event.route  # type: ignore[union-attr]


@pytest.mark.parametrize("prefix", ["", "/hf-inference"])
async def test_similarities_are_cosines(boot: Boots, prefix: str) -> None:
    path = f"{prefix}/models/bge/pipeline/sentence-similarity"
    reply = await posted(boot(fakes()), path, {"inputs": SIMILARITY, "parameters": {}})

    cosine = float(np.dot(vector_of("a b"), vector_of("c")))
    np.testing.assert_allclose([1.0, cosine], reply.json(), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/models/nothing/pipeline/feature-extraction", {"inputs": "a"}, 404),
        ("/hf-inference/models/cross/pipeline/feature-extraction", {"inputs": "a"}, 424),
        ("/models/bge/pipeline/sentence-similarity", {"inputs": "a"}, 422),
        ("/models/bge/pipeline/text-to-image", {"inputs": "a"}, 404),
        ("/hf-inference/models/bge", {"inputs": "a"}, 404),
    ],
)
async def test_errors_are_teis(boot: Boots, path: str, body: dict[str, Any], status: int) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert status == reply.status_code
    assert {"error", "error_type"} == reply.json().keys()


@pytest.mark.parametrize("start", ["/models", "/endpoints"])
async def test_invocations_name_a_model(boot: Boots, start: str) -> None:
    async with boot(fakes()) as gateway:
        vectors = await gateway.post(f"{start}/org/bge/invocations", {"inputs": ["a"]})
        ranks = await gateway.post(f"{start}/cross/invocations", {"query": "a", "texts": ["b"]})

    np.testing.assert_allclose([vector_of("a")], vectors.json(), rtol=1e-6)
    assert [0] == [rank["index"] for rank in ranks.json()]
