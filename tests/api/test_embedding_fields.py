"""Every field that OpenAI, Jina, NVIDIA NIM and Voyage document for /v1/embeddings: applied or refused."""

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.server.encoding import QuantizedType, quantize
from gateway.api.wire.vllm import VllmOptions
from tests.conftest import CONFIG, Boots, posted
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

PATH = "/v1/embeddings"
PROMPTED = CONFIG.replace(
    "bge: {upstream: embedder}",
    "bge: {upstream: embedder, prompts: {query: 'q: ', retrieval.passage: 'p: ', separation: 's: '}}",
)
CODE = CONFIG.replace(
    "bge: {upstream: embedder}",
    "bge: {upstream: embedder, prompts: {nl2code_query: 'c: ', code2nl_document: 'd: '}}",
)
LATE = """
upstreams: {late: {backend: vllm, replicas: ["http://late"]}}
models: {colbert: {upstream: late}}
"""
# Field → a value whose effect the gateway applies (or that asks for nothing), and one that it refuses.
# A field without the second is applied with every value; `user` is the only one that is ignored.
OPENAI_FIELDS: dict[str, tuple[Any, ...]] = {
    "input": ("a", {"image": "x"}),
    "model": ("bge", "nowhere"),
    "encoding_format": ("base64", "hex"),
    "dimensions": (4, 9),
    "user": ("u",),
}
JINA_FIELDS: dict[str, tuple[Any, ...]] = {
    "embedding_type": (["float", "ubinary"], "int4"),
    "encoding_type": ("float", "int4"),
    "task": ("retrieval.query", "nl2code.query"),
    "normalized": (False,),
    "truncate": (True, "MIDDLE"),
    "late_chunking": (False, True),
    "return_multivector": (False, True),
    "return_tokenized_input": (False, True),
    "input_type": ("document", "search_query"),
}
NIM_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_type": ("passage", "other"),
    "truncate": ("START", "MIDDLE"),
    "embedding_type": ("int8", "int4"),
    "modality": (["text"], "image"),
    "dimensions": (4, 9),
    "user": ("u",),
}
VOYAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_type": ("query", "other"),
    "truncation": (True, "yes"),
    "output_dimension": (4, 9),
    "output_dtype": ("int8", "int4"),
    "encoding_format": ("base64", "hex"),
}
PEERS = {"openai": OPENAI_FIELDS, "jina": JINA_FIELDS, "nim": NIM_FIELDS, "voyage": VOYAGE_FIELDS}
FIELDS = [(peer, field) for peer, fields in PEERS.items() for field in fields]


async def post_json(boot: Boots, body: Any, status: int = 200, config: str = CONFIG) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    replicas = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    for fake in replicas.values():
        fake.prompts = frozenset()
    reply = await posted(boot(replicas, config), PATH, {"input": "a"} | body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize(("peer", "field"), FIELDS)
async def test_a_documented_field_is_applied_or_refused(boot: Boots, peer: str, field: str) -> None:
    applied, *refused = PEERS[peer][field]
    await post_json(boot, {field: applied})
    for value in refused:
        reply = await post_json(boot, {field: value}, 404 if field == "model" else 400)
        assert reply["error"]["message"] == reply["detail"]


def test_each_field_of_the_body_belongs_to_a_peer() -> None:
    named = {field for fields in PEERS.values() for field in fields} - {"user"}
    own = {"embed_dtype", "endianness", "late_chunking_params"}
    vllms = {field.name for field in msgspec.structs.fields(VllmOptions)} | own

    assert {field.name for field in msgspec.structs.fields(OpenAIEmbeddingsRequest)} - vllms == named


@pytest.mark.parametrize("field", ["dimensions", "output_dimension"])
async def test_a_width_is_cut_under_either_name(boot: Boots, field: str) -> None:
    reply = await post_json(boot, {field: 4})

    cut = vector_of("a")[:4]
    np.testing.assert_allclose(cut / np.linalg.norm(cut), reply["data"][0]["embedding"], rtol=1e-6)


@pytest.mark.parametrize(
    "value", ["a", {"text": "a"}, ["a"], [{"text": "a"}], ["a", {"text": "b"}, "c"]], ids=str
)
async def test_texts_and_objects_with_text_are_inputs(boot: Boots, value: Any) -> None:
    items = (await post_json(boot, {"input": value}))["data"]

    texts = "abc" if len(items) == 3 else "a"
    vectors = np.array([item["embedding"] for item in items], np.float32)
    np.testing.assert_array_equal([vector_of(text) for text in texts], vectors)


@pytest.mark.parametrize(
    ("config", "fields", "prompt"),
    [
        (PROMPTED, {}, ""),
        (PROMPTED, {"task": None}, ""),
        (PROMPTED, {"task": "retrieval.query"}, "q: "),
        (PROMPTED, {"task": "retrieval.passage"}, "p: "),
        (PROMPTED, {"task": "separation"}, "s: "),
        (PROMPTED, {"task": "text-matching"}, ""),
        (PROMPTED, {"input_type": "query"}, "q: "),
        (PROMPTED, {"input_type": "passage"}, "p: "),
        (PROMPTED, {"input_type": "document"}, "p: "),
        (PROMPTED, {"input_type": "document", "task": "code.query"}, "q: "),
        (CODE, {"task": "nl2code.query"}, "c: "),
        (CODE, {"task": "code2nl.passage"}, "d: "),
    ],
    ids=str,
)
async def test_input_type_and_task_select_the_prompt(
    boot: Boots, config: str, fields: dict[str, Any], prompt: str
) -> None:
    reply = await post_json(boot, fields, config=config)

    np.testing.assert_array_equal(
        vector_of(prompt + "a"), np.array(reply["data"][0]["embedding"], np.float32)
    )


@pytest.mark.parametrize(("normalized", "length"), [(True, 1.0), (None, 1.0), (False, 2.0)])
async def test_normalized_decides_the_length(boot: Boots, normalized: bool | None, length: float) -> None:
    reply = await post_json(boot, {"normalized": normalized})

    np.testing.assert_allclose(vector_of("a") * length, reply["data"][0]["embedding"], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "fields", "status"),
    [
        ("bge", {"truncate": None}, 200),
        ("bge", {"truncate": True}, 200),
        ("bge", {"truncate": False}, 400),
        ("strict", {"truncate": None}, 400),
        ("strict", {"truncate": True}, 200),
        ("bge", {"truncate": "NONE"}, 400),
        ("strict", {"truncate": "END"}, 200),
        ("strict", {"truncate": "START"}, 200),
        ("bge", {"truncation": False}, 400),
        ("strict", {"truncation": True}, 200),
    ],
    ids=str,
)
async def test_truncation_of_each_peer(boot: Boots, model: str, fields: Any, status: int) -> None:
    await post_json(boot, {"input": "w " * 20, "model": model} | fields, status)


@pytest.mark.parametrize(("truncate", "direction"), [("START", "Left"), ("END", None)])
async def test_truncate_names_the_end_that_is_cut(boot: Boots, truncate: str, direction: str | None) -> None:
    replicas = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    async with boot(replicas) as gateway:
        await gateway.post(PATH, {"input": "w " * 20, "truncate": truncate})

    (sent,) = [request for fake in replicas.values() for _, request in fake.requests]
    assert direction == sent.get("truncation_direction")


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize(
    ("field", "as_list"), [("embedding_type", False), ("embedding_type", True), ("output_dtype", False)]
)
async def test_numbers_of_a_type(boot: Boots, field: str, as_list: bool, kind: QuantizedType) -> None:
    reply = await post_json(boot, {field: [kind] if as_list else kind})

    assert quantize(vector_of("a")[None], kind)[0].tolist() == reply["data"][0]["embedding"]


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
async def test_voyage_packs_the_numbers_of_a_type(boot: Boots, kind: QuantizedType) -> None:
    reply = await post_json(boot, {"output_dtype": kind, "encoding_format": "base64"})

    expected = quantize(vector_of("a")[None], kind)[0]
    packed = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), expected.dtype)
    np.testing.assert_array_equal(expected, packed)


async def test_several_types_are_listed_by_name(boot: Boots) -> None:
    reply = await post_json(boot, {"embedding_type": ["float", "base64", "ubinary", "float"]})

    embedding = reply["data"][0]["embedding"]
    assert ["float", "base64", "ubinary"] == list(embedding)
    assert quantize(vector_of("a")[None], "ubinary")[0].tolist() == embedding["ubinary"]


async def test_embedding_type_overrides_encoding_format(boot: Boots) -> None:
    reply = await post_json(boot, {"embedding_type": "base64", "encoding_format": "float"})

    packed = base64.b64decode(reply["data"][0]["embedding"])
    np.testing.assert_array_equal(vector_of("a"), np.frombuffer(packed, "<f4"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 9}, "dimensions"),
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
        # Fields that contradict each other.
        ({"dimensions": 4, "output_dimension": 2}, "output_dimension"),
        ({"truncate": True, "truncation": False}, "truncation"),
        ({"embedding_type": "float", "output_dtype": "int8"}, "output_dtype"),
        ({"use_activation": False, "normalized": True}, "normalized"),
        ({"use_activation": True, "normalized": False}, "normalized"),
        ({"use_activation": False, "softmax": True}, "use_activation"),
        ({"truncate": False, "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"truncate": "NONE", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"truncation": False, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"truncate": "START", "truncation_side": "right", "truncate_prompt_tokens": 4}, "truncation_side"),
        ({"use_activation": False, "return_multivector": True}, "use_activation"),
    ],
    ids=str,
)
async def test_unsupported_and_contradictory_fields_are_refused_by_name(
    boot: Boots, fields: Any, param: str
) -> None:
    error = (await post_json(boot, fields, 400))["error"]

    assert ("invalid_request_error", param) == (error["type"], error["param"])


async def reply_of_colbert(boot: Boots, path: str, body: Any, status: int = 200) -> Any:
    """Return the reply of a model with one vector for each token."""
    async with boot({"late": FakeVllm(task="token_embed")}, LATE) as gateway:
        reply = await gateway.post(path, {"input": ["a b", "c"]} | body)
    assert status == reply.status_code, reply.text
    return reply.json()


async def test_multivector_returns_a_vector_for_each_token(boot: Boots) -> None:
    reply = await reply_of_colbert(boot, PATH, {"return_multivector": True})
    same = await reply_of_colbert(boot, "/v1/multi-vector", {"input_type": "document"})

    assert reply["data"] == same["data"]
    assert [("embeddings", 0), ("embeddings", 1)] == [
        (item["object"], item["index"]) for item in reply["data"]
    ]
    assert [4, 3] == [len(item["embeddings"]) for item in reply["data"]]
    np.testing.assert_allclose(1, np.linalg.norm(reply["data"][0]["embeddings"], axis=1), rtol=1e-5)


async def test_multivectors_have_the_requested_type_and_width(boot: Boots) -> None:
    whole = await reply_of_colbert(boot, "/v1/multi-vector", {})
    reply = await reply_of_colbert(boot, "/v1/multi-vector", {"embedding_type": "base64", "dimensions": 4})

    rows = np.array(whole["data"][0]["embeddings"], np.float32)[:, :4]
    packed = [np.frombuffer(base64.b64decode(item), "<f4") for item in reply["data"][0]["embeddings"]]
    np.testing.assert_allclose(rows / np.linalg.norm(rows, axis=1, keepdims=True), packed, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"dimensions": 10_000}, "dimensions"), ({"normalized": False}, "normalized")],
    ids=str,
)
async def test_multivectors_refuse_what_they_cannot_have(boot: Boots, body: Any, param: str) -> None:
    assert param == (await reply_of_colbert(boot, "/v1/multi-vector", body, 400))["error"]["param"]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_activation": True, "normalized": True},
        {"truncate": "END", "truncation_side": "right"},
        {"truncate": True, "truncate_prompt_tokens": -1},
        {"late_chunking": False},
        {"return_multivector": False},
    ],
)
async def test_fields_that_say_the_same_twice_or_nothing_are_taken(boot: Boots, fields: Any) -> None:
    await post_json(boot, fields)
