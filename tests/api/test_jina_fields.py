"""The fields that Jina's clients add to /v1/embeddings."""

import base64
from typing import Any

import numpy as np
import pytest

from gateway.api.server.encoding import EmbeddingType, quantize
from tests.conftest import CONFIG, Boots, posted
from tests.fakes.tei import FakeTei, vector_of

PATH = "/v1/embeddings"
PROMPTED = CONFIG.replace(
    "bge: {upstream: embedder}",
    "bge: {upstream: embedder, prompts: {query: 'q: ', retrieval.passage: 'p: ', separation: 's: '}}",
)


async def post_json(boot: Boots, body: Any, status: int = 200, config: str = CONFIG) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    reply = await posted(boot({"tei-0": FakeTei(), "tei-1": FakeTei()}, config), PATH, body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize("value", ["a", {"text": "a"}, ["a"], [{"text": "a"}]], ids=str)
async def test_accepts_objects_with_text_as_inputs(boot: Boots, value: Any) -> None:
    (item,) = (await post_json(boot, {"input": value}))["data"]

    np.testing.assert_array_equal(vector_of("a"), np.array(item["embedding"], np.float32))


async def test_accepts_objects_and_strings_in_one_list(boot: Boots) -> None:
    reply = await post_json(boot, {"input": ["a", {"text": "b"}, "c"]})

    vectors = np.array([item["embedding"] for item in reply["data"]], np.float32)
    np.testing.assert_array_equal([vector_of(text) for text in "abc"], vectors)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, ""),
        ({"task": None}, ""),
        ({"task": "retrieval.query"}, "q: "),
        ({"task": "retrieval.passage"}, "p: "),
        ({"task": "separation"}, "s: "),
        ({"task": "text-matching"}, ""),
        ({"input_type": "query"}, "q: "),
        ({"input_type": "document"}, "p: "),
        ({"input_type": "document", "task": "code.query"}, "q: "),
    ],
    ids=str,
)
async def test_task_selects_the_models_prompt(boot: Boots, fields: Any, prompt: str) -> None:
    reply = await post_json(boot, {"input": "a", **fields}, config=PROMPTED)

    np.testing.assert_array_equal(
        vector_of(prompt + "a"), np.array(reply["data"][0]["embedding"], np.float32)
    )


@pytest.mark.parametrize(("normalized", "length"), [(True, 1.0), (None, 1.0), (False, 2.0)])
async def test_normalized_decides_the_length(boot: Boots, normalized: bool | None, length: float) -> None:
    reply = await post_json(boot, {"input": "a", "normalized": normalized})

    np.testing.assert_allclose(vector_of("a") * length, reply["data"][0]["embedding"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["binary", "ubinary"])
@pytest.mark.parametrize("as_list", [True, False])
async def test_embedding_type_selects_the_format_of_vectors(
    boot: Boots, kind: EmbeddingType, as_list: bool
) -> None:
    reply = await post_json(boot, {"input": "a", "embedding_type": [kind] if as_list else kind})

    expected = quantize(vector_of("a")[None, :], kind)[0].tolist()
    assert expected == reply["data"][0]["embedding"]


async def test_embedding_type_overrides_encoding_format(boot: Boots) -> None:
    reply = await post_json(boot, {"input": "a", "embedding_type": "base64", "encoding_format": "float"})

    packed = base64.b64decode(reply["data"][0]["embedding"])
    np.testing.assert_array_equal(vector_of("a"), np.frombuffer(packed, "<f4"))


@pytest.mark.parametrize(
    ("model", "truncate", "status"),
    [
        ("bge", None, 200),
        ("bge", True, 200),
        ("bge", False, 400),
        ("strict", None, 400),
        ("strict", True, 200),
    ],
)
async def test_truncate_decides_whether_long_inputs_are_cut(
    boot: Boots, model: str, truncate: bool | None, status: int
) -> None:
    await post_json(boot, {"input": "w " * 20, "model": model, "truncate": truncate}, status)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"late_chunking": True}, "late_chunking"),
        ({"late_chunking": True, "return_multivector": True}, "late_chunking"),
        ({"return_tokenized_input": True}, "return_tokenized_input"),
        ({"task": "juggling"}, "task"),
        ({"embedding_type": "int4"}, "embedding_type"),
        ({"embedding_type": []}, "embedding_type"),
        ({"input": {"image": "https://example.org/a.png"}}, "input"),
        ({"input": [{"text": "a", "image": "x"}]}, "input"),
        ({"input": [{}]}, "input"),
        ({"input": [{"text": ""}]}, "input"),
        ({"input_type": "search_query"}, "input_type"),
    ],
    ids=str,
)
async def test_rejects_unsupported_fields_with_openais_400(boot: Boots, wrong: Any, param: str) -> None:
    error = (await post_json(boot, {"input": "a"} | wrong, 400))["error"]

    assert ("invalid_request_error", param) == (error["type"], error["param"])


@pytest.mark.parametrize("field", ["late_chunking", "return_multivector"])
async def test_accepts_unsupported_switches_that_are_off(boot: Boots, field: str) -> None:
    await post_json(boot, {"input": "a", field: False})
